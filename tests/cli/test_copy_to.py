"""`--copy-to`: a machine and its disk are lost, and another goes on from the copies, to the bit."""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from paceline.errors import ExitCode
from tests.cli.conftest import Paceline, metrics_without_times, summary, wait_until
from tests.launch.waiting import patient
from tests.provision.aws.account import Account, own_home, served

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

_LONG = (
    "train digits --workers 2 --epochs 15 --target-accuracy none --snapshot-every-steps 15"
).split()
_SECRET = "testing-secret"


@pytest.fixture(scope="module")
def moto() -> Iterator[Account]:
    with served() as account:
        yield account


@pytest.fixture
def bucket(
    moto: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Mapping[str, str]]:
    """The environment in which boto3 asks a store with one empty bucket."""
    moto.reset()
    environment = moto.environment(own_home(tmp_path / "home"))
    environment["AWS_SECRET_ACCESS_KEY"] = _SECRET
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    moto.aws().call("s3", "create_bucket", Bucket="bucket")
    yield environment
    moto.faults()


def steps_there(moto: Account) -> list[int]:
    listed = moto.aws().pages("s3", "list_objects_v2", "Contents", Bucket="bucket")
    names = [entry.text("Key").split("/") for entry in listed]
    return sorted(int(n[-2][5:]) for n in names if n[-1] == "manifest.json")


def test_another_machine_goes_on_exactly_when_the_disk_is_lost(
    paceline: Paceline, tmp_path: Path, moto: Account, bucket: Mapping[str, str]
) -> None:
    undisturbed = paceline.run(*_LONG, "--run-dir", "undisturbed")
    assert undisturbed.code == 0, undisturbed.err
    first, second = tmp_path / "first", tmp_path / "second"
    for machine in (first, second):
        machine.mkdir()
    # The first machine trains, and goes with its disk.
    paceline.directory = first
    process = paceline.start(*_LONG, "--run-dir", "run", "--copy-to", "s3://bucket/all")
    wait_until(lambda: max(steps_there(moto), default=-1) > 20, "copies")
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    process.kill()
    lost = paceline.finish(process)
    shutil.rmtree(first)
    _, alive = psutil.wait_procs(family, timeout=patient(30))
    assert not alive
    # Another one has nothing but the URL.
    paceline.directory = second
    done = paceline.run("resume", "s3://bucket/all/run", "--run-dir", "other")
    assert done.code == 0, done.err
    assert "Fetched s3://bucket/all/run" in done.err
    run = second / "other"
    assert summary(run)["weights_sha256"] == summary(tmp_path / "undisturbed")["weights_sha256"]
    assert metrics_without_times(run) == metrics_without_times(tmp_path / "undisturbed")
    history = json.loads((run / "run.json").read_text())["history"]
    assert [start["reason"] for start in history] == ["start", "resume"]
    assert history[1]["from_step"] > 20
    # It has copied on to the same place, where old ones went.
    assert "Copied to s3://bucket/all/run" in done.out
    there = steps_there(moto)
    assert there[-1] == summary(run)["steps"]
    assert len(there) <= 4
    assert summary(run)["copy"]["complete"]  # type: ignore[index]
    # Nothing holds the credentials.
    texts = [path.read_text(errors="replace") for path in run.rglob("*") if path.is_file()]
    assert _SECRET not in "".join((*texts, lost.out, lost.err, done.out, done.err))


def test_a_store_that_hangs_costs_a_training_no_more_than_the_wait(
    paceline: Paceline, tmp_path: Path, moto: Account, bucket: Mapping[str, str]
) -> None:
    moto.faults(s3="hang", on="tensors.safetensors")
    arguments = ["--epochs", "2", "--run-dir", "run", "--copy-to", "s3://bucket/all"]
    done = paceline.run("train", "digits", "--workers", "2", *arguments, "--copy-wait-s", "1")
    assert done.code == 0, done.err
    assert "Finished 2 of 2 epochs" in done.out
    assert "not everything is copied to s3://bucket/all/run (within 1 s)" in done.err
    assert f"{tmp_path}/run has all of it" in done.err
    assert steps_there(moto) == []


def test_a_place_is_one_trainings_and_refused_to_others(paceline: Paceline, tmp_path: Path) -> None:
    where = ["--run-dir", "run", "--copy-to", f"file://{tmp_path}/away"]
    done = paceline.run("train", "digits", "--workers", "1", "--epochs", "1", *where)
    assert done.code == 0, done.err
    (tmp_path / "other").mkdir()
    paceline.directory = tmp_path / "other"
    refused = paceline.run("train", "digits", "--workers", "1", *where)
    assert refused.code == ExitCode.USAGE
    assert "holds the copies of another training" in refused.err
    assert not (tmp_path / "other/run").exists()


def test_a_finished_run_is_fetched_and_nothing_is_started(
    paceline: Paceline, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/away/run"
    where = ["--run-dir", "run", "--copy-to", f"file://{tmp_path}/away"]
    done = paceline.run("train", "digits", "--workers", "1", "--epochs", "1", *where)
    assert done.code == 0, done.err
    again = paceline.run("resume", url, "--run-dir", "fetched")
    assert again.code == 0, again.err
    assert f"Fetched {url}" in again.err
    assert f"{tmp_path}/fetched has finished: all 1 epoch" in again.out
    assert len(json.loads((tmp_path / "fetched/run.json").read_text())["history"]) == 1
    # With more to train it goes on, and isn't finished there until it is.
    more = ("--epochs", "2", "--allow-change", "epochs")
    gone_on = paceline.run("resume", "fetched", *more, "--copy-to", f"file://{tmp_path}/away")
    assert gone_on.code == 0, gone_on.err
    assert json.loads((tmp_path / "away/run/summary.json").read_text())["epochs"] == 2


def test_a_script_of_its_own_is_copied_too(paceline: Paceline, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_SCRIPT)
    again = paceline.run("run", "train.py", "--workers", "2", "--run-dir", "run")
    assert again.code == ExitCode.USAGE
    assert "give it --copy-to there" in again.err
    away = f"file://{tmp_path}/away"
    where = ["--workers", "2", "--global-batch", "8", "--run-dir", "run", "--copy-to", away]
    done = paceline.run("run", "train.py", *where)
    assert done.code == 0, done.err
    assert f"Copied to {away}/run" in done.out
    fetched = paceline.run("resume", f"{away}/run", "--run-dir", "fetched")
    assert fetched.code == 0, fetched.err
    again = paceline.run("resume", f"{away}/run", "--run-dir", "run")
    assert "nothing is fetched" in again.err
    assert (tmp_path / "fetched/metrics.csv").read_bytes() == (
        tmp_path / "run/metrics.csv"
    ).read_bytes()


_SCRIPT = """
import torch

import paceline

s = paceline.session(copy_to=f"file://{__file__.rpartition('/')[0]}/away")
model = s.model(torch.nn.Linear(3, 1))
optimizer = s.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
data = torch.utils.data.TensorDataset(torch.randn(32, 3), torch.randn(32, 1))
loader = s.loader(data)
for epoch in s.epochs(2):
    for x, y in loader:
        s.step(torch.nn.functional.mse_loss(model(x), y))
"""
