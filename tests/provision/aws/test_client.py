"""Calls to AWS that fail: one line each, which says what to do."""

import socket
import sys

import pytest

from paceline.errors import InfrastructureError, UsageError
from paceline.launch.aws_client import AwsError, connect
from tests.provision.aws.account import Account

pytestmark = pytest.mark.xdist_group("aws")


@pytest.mark.slow
def test_without_credentials(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(UsageError, match="no AWS credentials were found: set AWS_PROFILE"):
        connect()


def test_without_a_region(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_REGION")
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    assert connect().region == "us-east-1"
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    assert connect().region == "eu-west-1"


def test_with_a_profile_that_is_not_there(
    account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(UsageError, match="nobody"):
        connect()


def test_without_boto3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(UsageError, match=r"pip install 'paceline\[s3\]'"):
        connect()


def test_a_refusal_has_its_code(account: Account) -> None:
    with pytest.raises(AwsError, match="AWS refused ec2:DescribeSubnets") as caught:
        account.aws().call("ec2", "describe_subnets", SubnetIds=["subnet-1"])
    assert caught.value.code == "InvalidSubnetID.NotFound"


def test_aws_that_cannot_be_reached(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setattr("time.sleep", lambda _: None)  # between attempts
    with pytest.raises(InfrastructureError, match="AWS couldn't be asked"):
        connect().call("ec2", "describe_subnets")


def test_all_pages_are_read(account: Account) -> None:
    aws = account.aws()
    image = "ami-1e749f67"
    aws.call("ec2", "run_instances", ImageId=image, MinCount=7, MaxCount=7, InstanceType="m5.large")
    pages = aws.pages("ec2", "describe_instances", "Reservations", MaxResults=5)
    assert sum(1 for each in pages for _ in each["Instances"]) == 7
