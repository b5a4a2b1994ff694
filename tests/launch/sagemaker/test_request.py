"""The request against AWS's own description of the operation, which comes with botocore."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from botocore.model import ListShape, MapShape, Shape, StructureShape
from botocore.validate import ParamValidator

from paceline._version import __version__
from paceline.errors import UsageError
from paceline.launch.sagemaker import bootstrap
from paceline.launch.sagemaker.options import SagemakerOptions, split_s3
from paceline.launch.sagemaker.request import Submission, check, files, request
from tests.launch.cluster_jobs import a_job

NEEDED: dict[str, Any] = {
    "instance_type": "ml.g5.12xlarge",
    "role": "arn:aws:iam::123456789012:role/training",
    "s3_output": "s3://my-bucket/paceline",
}
EVERYTHING: dict[str, Any] = NEEDED | {
    "spot": True,
    "max_wait": "3h",
    "volume_gb": 200,
    "tag": ("team=vision", "cost center=4711"),
    "encrypt_between_nodes": True,
    "vpc_subnet": ("subnet-1", "subnet-2"),
    "vpc_security_group": ("sg-1",),
}


def a_submission(job: dict[str, Any], options: dict[str, Any]) -> Submission:
    made = Submission(
        job=a_job(**job), options=SagemakerOptions(**options), name="paceline-digits-1a", id="1a"
    )
    check(made)
    return made


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


@pytest.mark.parametrize("options", [NEEDED, EVERYTHING], ids=["needed", "everything"])
@pytest.mark.parametrize("job", [{}, {"time_limit_s": 3600.0, "max_restarts": 0}])
def test_aws_knows_every_field(
    job: dict[str, Any], options: dict[str, Any], operation: Shape
) -> None:
    written = request(a_submission({"time_limit_s": 3600.0} | job, options))
    assert all_faults(operation, dict(written)) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("Tag", []), ("TrainingJobName", "a_b"), ("EnableManagedSpotTraining", "yes")],
)
def test_what_aws_would_not_take_is_found(name: str, value: object, operation: Shape) -> None:
    assert all_faults(operation, {**request(a_submission({}, NEEDED)), name: value})


def test_spot_waits_and_keeps_its_snapshots() -> None:
    written: Any = request(a_submission({"time_limit_s": 7200.0}, EVERYTHING))
    assert written["EnableManagedSpotTraining"] is True
    assert written["StoppingCondition"] == {
        "MaxRuntimeInSeconds": 7200,
        "MaxWaitTimeInSeconds": 10800,
    }
    assert written["CheckpointConfig"] == {
        "S3Uri": "s3://my-bucket/paceline/paceline-digits-1a/checkpoints/",
        "LocalPath": "/opt/ml/checkpoints",
    }
    usual: Any = request(a_submission({}, NEEDED | {"spot": True}))
    assert usual["StoppingCondition"]["MaxWaitTimeInSeconds"] == 2 * 24 * 3600


@pytest.mark.parametrize("wanted", [False, True])
def test_what_goes_between_nodes_is_encrypted_where_that_is_wanted(wanted: bool) -> None:
    written: Any = request(a_submission({}, NEEDED | {"encrypt_between_nodes": wanted}))
    assert written["EnableInterContainerTrafficEncryption"] is wanted


def test_what_is_uploaded() -> None:
    submission = a_submission({"workers": 4}, NEEDED)
    uploaded = files(submission, b"the code")
    assert uploaded["code.tar.gz"] == b"the code"
    assert uploaded["bootstrap.py"] == Path(bootstrap.__file__).read_bytes()
    job = json.loads(uploaded["job.json"])
    assert job["requirement"] == f"paceline=={__version__}"
    run_dir = "/opt/ml/checkpoints/a"
    assert job["command"][-6:] == ["train", "digits", "--workers", "4", "--run-dir", run_dir]
    assert submission.run_uri == "s3://my-bucket/paceline/paceline-digits-1a/checkpoints/a"


def test_going_on_reads_the_earlier_jobs_snapshots() -> None:
    earlier = "s3://my-bucket/paceline/paceline-digits-0f/checkpoints/a"
    submission = a_submission({"run_dir": earlier, "resume": True}, NEEDED)
    written: Any = request(submission)
    assert written["CheckpointConfig"]["S3Uri"] == earlier[: -len("a")]
    words = json.loads(files(submission, b"")["job.json"])["command"]
    assert "--resume" in words
    assert words[-1] == "/opt/ml/checkpoints/a"
    assert submission.code_uri.startswith("s3://my-bucket/paceline/paceline-digits-1a/")


@pytest.mark.parametrize(
    ("job", "options", "said"),
    [
        ({}, {"instance_type": None}, "needs --instance-type"),
        ({}, {"role": None}, "needs --role"),
        ({}, {"s3_output": None}, "needs --s3-output"),
        ({"image": None}, {}, "needs --image"),
        ({"run_dir": "s3://b/a"}, {}, "give --resume"),
        ({"resume": True}, {}, "--resume needs --run-dir s3"),
        ({"time_limit_s": 7200.0}, {"spot": True, "max_wait": "1h"}, "shorter than"),
        ({}, {"instance_type": "g5.12xlarge"}, "--instance-type"),
        ({}, {"role": "training"}, "--role"),
        ({}, {"s3_output": "my-bucket"}, "--s3-output"),
        ({}, {"tag": ("team",)}, "--tag"),
        ({}, {"max_wait": "1h"}, "give --spot"),
        ({}, {"volume_gb": 0}, "--volume-gb"),
        ({}, {"vpc_subnet": ("subnet-1",)}, "need each other"),
    ],
)
def test_what_sagemaker_would_not_take(
    job: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        a_submission(job, NEEDED | options)


def test_s3_addresses() -> None:
    assert split_s3("s3://bucket/a/b/") == ("bucket", "a/b")
    assert split_s3("s3://bucket") == ("bucket", "")
