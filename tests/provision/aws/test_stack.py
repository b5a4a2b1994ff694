"""Creating nodes and deleting them, against moto's server: all of them or nothing."""

import signal
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from paceline.errors import InfrastructureError, PacelineError, UsageError
from paceline.provision.aws.options import NetworkOptions, NodeOptions
from paceline.provision.aws.stack import (
    Aws,
    Node,
    Stack,
    connect,
    create_nodes,
    delete_nodes,
    find_leftovers,
    find_nodes,
    find_stack,
    make_plan,
)
from paceline.provision.aws.template import CLUSTER_TAG, Plan
from tests.provision.aws.account import PUBLIC_KEY, Account

pytestmark = pytest.mark.xdist_group("aws")

NAME = "paceline"
IMAGE = "ami-1e749f67"  # one that moto has


def planned(
    aws: Aws, network: NetworkOptions | None = None, *, image: str = IMAGE, **options: object
) -> Plan:
    nodes = NodeOptions(image=image, **options)  # type: ignore[arg-type]
    network = network or NetworkOptions(efa=False)
    return make_plan(aws, NAME, nodes, network, public_key=PUBLIC_KEY, ssh_from="192.0.2.7/32")


def create(aws: Aws, plan: Plan, say: Callable[[str], None] = lambda _: None) -> list[Node]:
    used: list[Node] = []

    def use(stack: Stack, nodes: Sequence[Node]) -> None:
        assert stack.status == "CREATE_COMPLETE"
        used.extend(nodes)

    create_nodes(aws, plan, say, use)
    return used


@pytest.mark.parametrize("source", ["ami", "ssm"])
def test_nodes_come_and_go(account: Account, source: str) -> None:
    aws = connect(None)
    image = IMAGE
    if source == "ssm":
        image = "/own/image"
        account.aws().call("ssm", "put_parameter", Name=image, Value=IMAGE, Type="String")
    plan = planned(aws, image=image, bucket="data/stl10")
    nodes = create(aws, plan)
    assert nodes == find_nodes(aws, NAME)
    assert [node.name for node in nodes] == ["Node0", "Node1"]
    stack = find_stack(aws, NAME)
    assert stack is not None
    assert (stack.outputs["StopAfterMinutes"], stack.outputs["Slots"]) == ("720", "4")
    kinds = {text.partition(" ")[0] for text in find_leftovers(aws, NAME)}
    assert {"instance", "security-group", "launch-template"} <= kinds
    assert {"subnet", "route-table", "internet-gateway", "vpc"} <= kinds
    (image_of,) = {
        each["ImageId"]
        for found in aws.ec2.describe_instances()["Reservations"]
        for each in found["Instances"]
    }
    assert image_of == IMAGE
    said: list[str] = []
    delete_nodes(aws, NAME, said.append)
    assert said[-1] == "nothing is left of paceline in us-east-1"
    assert find_leftovers(aws, NAME) == []
    delete_nodes(aws, NAME, said.append)  # harmless


def test_nodes_with_fabric_adapters_get_elastic_addresses(account: Account) -> None:
    aws = connect(None)
    plan = planned(aws, NetworkOptions())
    assert plan.fabric_cards == (0,)
    nodes = create(aws, plan)
    addresses = aws.ec2.describe_addresses()["Addresses"]
    given = {each["NetworkInterfaceId"]: each["PublicIp"] for each in addresses}
    assert given == {node.interface: node.public_address for node in nodes}
    delete_nodes(aws, NAME, lambda _: None)
    assert aws.ec2.describe_addresses()["Addresses"] == []


def test_another_stack_of_that_name_is_left_alone(account: Account) -> None:
    aws = connect(None)
    template = '{"Resources": {"Q": {"Type": "AWS::SQS::Queue"}}}'
    aws.cloudformation.create_stack(StackName=NAME, TemplateBody=template)
    with pytest.raises(UsageError):
        create(aws, planned(aws))
    with pytest.raises(UsageError):
        delete_nodes(aws, NAME, lambda _: None)
    stack = find_stack(aws, NAME)
    assert stack is not None
    assert stack.status == "CREATE_COMPLETE"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_rolls_everything_back(account: Account, number: signal.Signals) -> None:
    """While AWS creates the stack, and with the terminal closed."""
    aws = connect(None)
    account.faults(hold=True)
    left = []

    def closed(line: str) -> None:
        if line.startswith("creating"):
            left.extend(find_leftovers(aws, NAME))
            signal.raise_signal(number)
        raise BrokenPipeError

    with pytest.raises(KeyboardInterrupt):
        create(aws, planned(aws), closed)
    assert len(left) > 6
    assert find_leftovers(aws, NAME) == []


def test_a_stack_that_fails_leaves_nothing(account: Account) -> None:
    aws = connect(None)
    account.faults(fail="We currently do not have sufficient g5.12xlarge capacity")
    with pytest.raises(InfrastructureError, match="Node0: We currently do not have sufficient"):
        create(aws, planned(aws))
    account.faults()
    assert find_stack(aws, NAME) is None
    assert find_leftovers(aws, NAME) == []


def test_a_missing_permission_is_named(account: Account) -> None:
    aws = connect(None)
    plan = planned(aws)
    account.faults(deny=["cloudformation:CreateStack"])
    with pytest.raises(UsageError, match="cloudformation:CreateStack"):
        create(aws, plan)
    account.faults(fail="Something", deny=["cloudformation:DeleteStack"])
    with pytest.raises(InfrastructureError, match="paceline aws down --name paceline tries again"):
        create(aws, plan)


def test_what_is_left_is_named(account: Account) -> None:
    aws = connect(None)
    tags = [{"Key": CLUSTER_TAG, "Value": NAME}]
    group = aws.ec2.create_security_group(
        GroupName="orphan",
        Description="orphan",
        TagSpecifications=[{"ResourceType": "security-group", "Tags": tags}],
    )["GroupId"]
    with pytest.raises(InfrastructureError, match=f"security-group {group}"):
        delete_nodes(aws, NAME, lambda _: None)


@pytest.mark.parametrize(
    ("network", "options"),
    [
        ({}, {"instance_type": "g5.huge"}),
        ({"efa": True}, {"instance_type": "m5.large"}),
        ({"subnet": "subnet-1"}, {}),
    ],
)
def test_what_is_not_there(
    account: Account, network: dict[str, object], options: dict[str, object]
) -> None:
    with pytest.raises(UsageError):
        planned(connect(None), NetworkOptions(**network), **options)  # type: ignore[arg-type]


def test_nodes_in_a_subnet_of_ones_own(account: Account) -> None:
    aws = connect(None)
    subnet = aws.ec2.describe_subnets()["Subnets"][0]
    plan = planned(aws, NetworkOptions(subnet=subnet["SubnetId"], efa=False))
    assert (plan.site.vpc, plan.site.zone) == (subnet["VpcId"], subnet["AvailabilityZone"])
    private = replace(plan, site=replace(plan.site, public=False), fabric_cards=(0,))
    assert not private.elastic_addresses
    create(aws, plan)
    assert not {text for text in find_leftovers(aws, NAME) if text.startswith("vpc")}
    delete_nodes(aws, NAME, lambda _: None)
    assert subnet["SubnetId"] in {s["SubnetId"] for s in aws.ec2.describe_subnets()["Subnets"]}


def test_errors_before_aws_is_reached(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(UsageError, match="nobody"):
        connect(None)
    monkeypatch.delenv("AWS_PROFILE")
    monkeypatch.delenv("AWS_REGION")
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    with pytest.raises(UsageError, match="no AWS region is set: give --region"):
        connect(None)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(PacelineError, match="no AWS credentials were found: set AWS_PROFILE"):
        find_stack(connect("eu-west-1"), NAME)
