"""The request against AWS's own description of the operation, which comes with botocore."""

import json
import re
from collections.abc import Iterator
from typing import Any

import boto3
import botocore.session
import pytest
from botocore.model import ListShape, MapShape, Shape, StructureShape
from botocore.stub import Stubber
from botocore.validate import ParamValidator

from paceline.errors import UsageError
from paceline.launch.sagemaker import SagemakerLauncher, SagemakerOptions
from tests.launch.cluster_jobs import a_job

NEEDED: dict[str, Any] = {
    "instance_type": "ml.g5.12xlarge",
    "role": "arn:aws:iam::123456789012:role/training",
    "s3_output": "s3://my-bucket/paceline/",
}
SPOT = {
    "EnableManagedSpotTraining": True,
    "StoppingCondition": {"MaxWaitTimeInSeconds": 90000},
    "ResourceConfig": {"VolumeSizeInGB": 500},
    "Tags": [{"Key": "team", "Value": "vision"}],
}


def request(**job: Any) -> dict[str, Any]:
    rendered = SagemakerLauncher(SagemakerOptions(**NEEDED)).render(a_job(**job))
    content: dict[str, Any] = json.loads(rendered.files["sagemaker.json"])
    return content


def faults(shape: Shape, value: Any, where: str = "") -> Iterator[str]:
    """Find what botocore's own validation doesn't look at: patterns, closed sets, lengths."""
    if isinstance(shape, StructureShape):
        for name, inner in value.items():
            yield from faults(shape.members[name], inner, f"{where}.{name}")
    elif isinstance(shape, ListShape):
        for inner in value:
            yield from faults(shape.member, inner, f"{where}[]")
    elif isinstance(shape, MapShape):
        for key, inner in value.items():
            yield from faults(shape.key, key, f"{where} {key}")
            yield from faults(shape.value, inner, f"{where}.{key}")
    elif isinstance(value, str):
        yield from (f"{where}: {fault}" for fault in faults_of_text(shape.metadata, value))


def faults_of_text(rules: dict[str, Any], value: str) -> Iterator[str]:
    if "enum" in rules and value not in rules["enum"]:
        yield f"{value} is none of the known"
    # Java's classes of letters, separators and numbers, which Python doesn't know
    pattern = rules.get("pattern", ".*").replace(r"\p{L}\p{Z}\p{N}", r"\w ")
    if not re.fullmatch(pattern, value):
        yield f"{value} isn't {pattern}"
    if len(value) > rules.get("max", len(value)):
        yield "too long"


@pytest.fixture(scope="module")
def operation() -> Shape:
    model = botocore.session.get_session().get_service_model("sagemaker")
    shape = model.operation_model("CreateTrainingJob").input_shape
    assert shape is not None
    return shape


def all_faults(shape: Shape, content: dict[str, Any]) -> list[str]:
    report = ParamValidator().validate(content, shape).generate_report()
    return [*filter(None, [report]), *([] if report else faults(shape, content))]


def test_gpus_follow_from_the_instance_type() -> None:
    with pytest.raises(UsageError, match="--instance-type"):
        request(gpus_per_node=4)


@pytest.mark.parametrize("job", [{}, {"time_limit_s": 3600, "max_restarts": 0}, {"patch": SPOT}])
def test_aws_knows_every_field(job: dict[str, Any], operation: Shape) -> None:
    assert all_faults(operation, request(**job)) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("Tag", []), ("TrainingJobName", "a_b"), ("EnableManagedSpotTraining", "yes")],
)
def test_what_aws_would_not_take_is_found(name: str, value: object, operation: Shape) -> None:
    assert all_faults(operation, {**request(), name: value})


def test_the_same_run_directory_goes_on_from_the_same_place() -> None:
    content, again = request(time_limit_s=7200, patch=SPOT), request(run_dir="runs/a")
    assert content["StoppingCondition"] == {
        "MaxRuntimeInSeconds": 7200,
        "MaxWaitTimeInSeconds": 90000,
    }
    assert content["CheckpointConfig"] == {
        "S3Uri": "s3://my-bucket/paceline/a/checkpoints",
        "LocalPath": "/opt/ml/checkpoints",
    }
    assert again["CheckpointConfig"] == content["CheckpointConfig"]
    assert again["TrainingJobName"] != content["TrainingJobName"]
    command = content["AlgorithmSpecification"]["ContainerEntrypoint"]
    assert command[-3:] == ["--run-dir", "/opt/ml/checkpoints/a", "--resume"]


@pytest.mark.parametrize("option", NEEDED)
def test_what_is_needed(option: str) -> None:
    launcher = SagemakerLauncher(SagemakerOptions(**{**NEEDED, option: None}))
    with pytest.raises(UsageError, match=f"needs --{option.replace('_', '-')}, such as"):
        launcher.render(a_job())


def test_it_is_created_by_boto3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    client = boto3.client("sagemaker", region_name="us-east-1")
    monkeypatch.setattr(boto3, "client", lambda service: client)
    launcher = SagemakerLauncher(SagemakerOptions(**NEEDED))
    rendered = launcher.render(a_job())
    sent = json.loads(rendered.files["sagemaker.json"])
    arn = "arn:aws:sagemaker:us-east-1:123456789012:training-job/a"
    with Stubber(client) as stub:
        stub.add_response("create_training_job", {"TrainingJobArn": arn}, sent)
        launcher.submit(rendered)
        assert capsys.readouterr().out == f"Created {arn}\n"
        stub.add_client_error("create_training_job", "AccessDeniedException", "not yours")
        with pytest.raises(UsageError, match=r"not submitted: .*not yours"):
            launcher.submit(rendered)
