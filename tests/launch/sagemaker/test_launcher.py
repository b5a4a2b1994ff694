"""Submitting to moto's server over HTTP; following and stopping by a server that plays a job.

moto ends a training job at once and can't stop one (5.2: StopTrainingJob isn't implemented), so
that what happens while a job runs is played by a small server of our own.
"""

import io
import os
import signal
import tarfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from botocore.loaders import Loader, create_loader

from paceline.errors import ExitCode, InfrastructureError, UsageError
from paceline.launch import follow
from paceline.launch.aws_client import AwsError
from paceline.launch.cluster import ClusterJob
from paceline.launch.follow import launch
from paceline.launch.json_fields import Answer
from paceline.launch.sagemaker.job import SagemakerJob, host_of, outcome
from paceline.launch.sagemaker.launcher import SagemakerLauncher
from paceline.launch.sagemaker.options import SagemakerOptions
from tests.launch.cluster_jobs import a_job
from tests.launch.sagemaker.server import NAME, Job, served_job, state
from tests.provision.aws.account import Account, emptied, served

OPTIONS = SagemakerOptions(
    instance_type="ml.g5.12xlarge",
    role="arn:aws:iam::123456789012:role/training",
    s3_output="s3://my-bucket/paceline",
)
GROUP = "/aws/sagemaker/TrainingJobs"


def submit(job: ClusterJob, options: SagemakerOptions) -> int:
    return launch(SagemakerLauncher(options), job)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SagemakerJob, "poll_s", 0.02)
    monkeypatch.setattr(follow, "LOOK_S", 0.01)
    monkeypatch.setattr("secrets.token_hex", lambda size: "abc123")


@pytest.fixture(scope="module")
def loader() -> Loader:
    return create_loader()


@pytest.fixture(autouse=True)
def models_read_once(loader: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Share AWS's descriptions of its services, which take seconds to read."""
    monkeypatch.setattr("botocore.session.create_loader", lambda *_: loader)


@pytest.fixture
def code(tmp_path: Path) -> Path:
    directory = tmp_path / "code"
    directory.mkdir()
    (directory / "train.py").write_text("print(1)\n")
    return directory


@pytest.fixture(scope="module")
def moto() -> Iterator[Account]:
    with served() as account:
        yield account


@pytest.fixture
def account(moto: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Account:
    aws = emptied(moto, tmp_path, monkeypatch).aws()
    aws.call("s3", "create_bucket", Bucket="my-bucket")
    aws.call("logs", "create_log_group", logGroupName=GROUP)
    return moto


def objects(account: Account) -> list[str]:
    listed = account.aws().call("s3", "list_objects_v2", Bucket="my-bucket")
    return [entry.text("Key") for entry in listed["Contents"]]


def put_lines(account: Account, stream: str, *lines: str) -> None:
    aws, where = account.aws(), {"logGroupName": GROUP, "logStreamName": stream}
    aws.call("logs", "create_log_stream", **where)
    now_ms = int(time.time() * 1000)  # old ones are refused
    events = [{"timestamp": now_ms + n, "message": m} for n, m in enumerate(lines)]
    aws.call("logs", "put_log_events", **where, logEvents=events)


@pytest.mark.slow
def test_code_job_and_logs(
    account: Account, code: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_lines(account, f"{NAME}/algo-1-1790000000", "epoch 1", "epoch 2")
    put_lines(account, f"{NAME}/algo-2-1790000001", "hello")
    put_lines(account, "another-job/algo-1-1790000000", "not ours")
    assert submit(a_job(directory=code, nodes=2), OPTIONS) == ExitCode.DONE
    aws = account.aws()
    described = aws.call("sagemaker", "describe_training_job", TrainingJobName=NAME)
    assert described["ResourceConfig"].count("InstanceCount") == 2
    assert described.text("RoleArn") == OPTIONS.role
    prefix = f"paceline/{NAME}/code"
    assert objects(account) == [
        f"{prefix}/{n}" for n in ("bootstrap.py", "code.tar.gz", "job.json")
    ]
    stored = aws.call("s3", "get_object", Bucket="my-bucket", Key=f"{prefix}/code.tar.gz")
    body: Any = stored.members()["Body"]._content
    with tarfile.open(fileobj=io.BytesIO(body.read())) as archive:
        assert archive.getnames() == ["train.py"]
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("[")] == [
        "[algo-1] epoch 1",
        "[algo-1] epoch 2",
        "[algo-2] hello",
    ]
    assert f"The run directory is s3://my-bucket/paceline/{NAME}/checkpoints/a" in out


@pytest.mark.slow
def test_a_bucket_that_is_not_there(account: Account, code: Path) -> None:
    account.aws().call("s3", "delete_bucket", Bucket="my-bucket")
    with pytest.raises(AwsError, match="NoSuchBucket"):
        submit(a_job(directory=code), OPTIONS)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    with served_job(tmp_path, monkeypatch) as played:
        yield played


def test_states_and_lines_are_shown_as_they_come(
    job: Job, code: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    states = [
        state("InProgress", "Starting"),
        state("InProgress", "Training"),
        state("Failed", "Failed", "AlgorithmError: , exit code: 65"),
    ]
    job.answers["DescribeTrainingJob"] = lambda n: (200, states[min(n, 2)])
    streams = [{"logStreamName": f"{NAME}/algo-{n}-1790000000"} for n in (1, 2)]
    job.answers["DescribeLogStreams"] = lambda n: (
        (200, {"logStreams": streams[:1], "nextToken": "more"})
        if n % 2 == 0
        else (200, {"logStreams": streams[1:]})
    )
    lines = [{"events": [{"message": "line"}], "nextForwardToken": "t1"}] * 2
    empty = {"events": [], "nextForwardToken": "t1"}
    job.answers["GetLogEvents"] = lambda n: (200, lines[0] if n in (0, 2) else empty)
    assert submit(a_job(directory=code), OPTIONS) == ExitCode.JOB
    out, err = capsys.readouterr()
    assert out.count("[algo-1] line") == 1
    assert out.count("[algo-2] line") == 1
    assert f"{NAME}: Starting: it is Starting\n{NAME}: Training: it is Training" in err
    assert "AlgorithmError: , exit code: 65" in err


@pytest.mark.parametrize(
    ("status", "detail", "reason", "expected"),
    [
        ("Completed", "Completed", "", ExitCode.DONE),
        ("Stopped", "Stopped", "", ExitCode.RESUMABLE),
        ("Stopped", "MaxRuntimeExceeded", "", ExitCode.RESUMABLE),
        ("Stopped", "MaxWaitTimeExceeded", "", ExitCode.RESUMABLE),
        ("Failed", "Failed", "AlgorithmError: , exit code: 65", ExitCode.JOB),
        ("Failed", "Failed", "AlgorithmError: , exit code: 2", ExitCode.USAGE),
        ("Failed", "Failed", "AlgorithmError: , exit code: 70", ExitCode.INFRASTRUCTURE),
        ("Failed", "Failed", "CapacityError: no such instances", ExitCode.INFRASTRUCTURE),
    ],
)
def test_the_exit_code(status: str, detail: str, reason: str, expected: ExitCode) -> None:
    ended = outcome(Answer(state(status, detail, reason)))
    assert ended is not None
    assert ended.code == expected


@pytest.mark.parametrize("detail", ["Starting", "Training", "Interrupted", "Restarting"])
def test_it_goes_on_through_interruptions(detail: str) -> None:
    assert outcome(Answer(state("InProgress", detail))) is None


def send_once(job: Job, operation: str, number: signal.Signals) -> threading.Thread:
    def wait() -> None:
        job.wait_for(operation)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_job_and_waits_for_its_end(
    number: signal.Signals, job: Job, code: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def describe(before: int) -> tuple[int, Mapping[str, Any]]:
        if not job.count("StopTrainingJob"):
            return 200, state("InProgress", "Training")
        asked = [name for name, _ in job.asked if "TrainingJob" in name]
        since = len(asked) - asked.index("StopTrainingJob")
        return 200, state("Stopping") if since < 4 else state("Stopped")

    job.answers["DescribeTrainingJob"] = describe
    job.answers["StopTrainingJob"] = lambda _: (200, {})
    thread = send_once(job, "DescribeTrainingJob", number)
    assert submit(a_job(directory=code), OPTIONS) == ExitCode.RESUMABLE
    thread.join()
    assert [c for name, c in job.asked if name == "StopTrainingJob"] == [{"TrainingJobName": NAME}]
    asked = [name for name, _ in job.asked if "TrainingJob" in name]
    assert asked[asked.index("StopTrainingJob") + 1 :] == ["DescribeTrainingJob"] * 3
    run = f"s3://my-bucket/paceline/{NAME}/checkpoints/a"
    assert f"--resume and --run-dir {run}" in capsys.readouterr().out


def test_a_stop_that_fails_says_what_may_still_cost(job: Job, code: Path) -> None:
    job.answers["DescribeTrainingJob"] = lambda _: (200, state("InProgress", "Training"))
    broken = {"__type": "ConflictException", "message": "not now"}
    job.answers["StopTrainingJob"] = lambda _: (400, broken)
    thread = send_once(job, "DescribeTrainingJob", signal.SIGINT)
    with pytest.raises(InfrastructureError, match=rf"cost\. .* --training-job-name {NAME}"):
        submit(a_job(directory=code), OPTIONS)
    thread.join()


DENIED = {
    "__type": "AccessDeniedException",
    "message": "User: me is not authorized to perform: x:Y on resource: z",
}


def test_a_job_that_is_refused_leaves_nothing(job: Job, code: Path) -> None:
    job.answers["CreateTrainingJob"] = lambda _: (400, DENIED)
    with pytest.raises(UsageError, match="lack the permission x:Y"):
        submit(a_job(directory=code), OPTIONS)
    put, deleted = (
        [content["path"] for name, content in job.asked if name == operation]
        for operation in ("PutObject", "DeleteObject")
    )
    assert len(put) == 3
    assert deleted == put


def test_without_the_right_to_read_logs_it_goes_on(
    job: Job, code: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    states = [state("InProgress", "Training"), state("Completed")]
    job.answers["DescribeTrainingJob"] = lambda n: (200, states[min(n, 1)])
    job.answers["DescribeLogStreams"] = lambda _: (400, DENIED)
    assert submit(a_job(directory=code), OPTIONS) == ExitCode.DONE
    assert capsys.readouterr().err.count("output can't be shown") == 1


def test_detached_it_returns_at_once(job: Job, code: Path) -> None:
    assert submit(a_job(directory=code, detach=True), OPTIONS) == ExitCode.DONE
    assert job.count("DescribeTrainingJob") == 0


def test_a_dry_run_asks_nobody(job: Job, code: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit(a_job(directory=code, dry_run=True), OPTIONS) == ExitCode.DONE
    out = capsys.readouterr().out
    assert "# 1 files of" in out
    assert yaml.safe_load(out)["TrainingJobName"] == NAME
    assert job.asked == []


def test_without_boto3(monkeypatch: pytest.MonkeyPatch, code: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'paceline\[sagemaker\]'"):
        submit(a_job(directory=code), OPTIONS)


def test_hosts_of_streams() -> None:
    assert host_of(f"{NAME}/algo-1-1790000000") == "algo-1"
    assert host_of(f"{NAME}/algo-12") == "algo-12"
