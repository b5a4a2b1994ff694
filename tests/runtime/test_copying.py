"""Copies beside a training: a store that fails, hangs or spoils bytes holds nothing up."""

import json
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from paceline.checkpoint.options import SnapshotOptions
from paceline.checkpoint.remote.copier import OWNER
from paceline.checkpoint.remote.process import CopySpec
from paceline.errors import UsageError
from paceline.results.run_directory import RunDirectory
from paceline.runtime import copying
from paceline.runtime.copying import copied
from tests.checkpoint.remote.places import a_run, a_snapshot, publish
from tests.launch.waiting import patient
from tests.provision.aws.account import Account, own_home, served

pytestmark = pytest.mark.slow

_SECRET = "testing-secret"


@pytest.fixture(scope="module")
def moto() -> Iterator[Account]:
    with served() as account:
        yield account


@pytest.fixture
def bucket(moto: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Account:
    moto.reset()
    environment = moto.environment(own_home(tmp_path / "home"))
    for name, value in (environment | {"AWS_SECRET_ACCESS_KEY": _SECRET}).items():
        monkeypatch.setenv(name, value)
    moto.aws().call("s3", "create_bucket", Bucket="bucket")
    return moto


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = a_run(tmp_path / "run")
    run.run_json.write_text(json.dumps({"format": 1, "kind": "recipe", "settings": {}}))
    return run


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + patient(60)
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def of_summary(run: RunDirectory) -> dict[str, object]:
    content = run.read_summary()["copy"]
    assert isinstance(content, dict)
    return content


def keys(account: Account) -> list[str]:
    listed = account.aws().pages("s3", "list_objects_v2", "Contents", Bucket="bucket")
    return [entry.text("Key") for entry in listed]


def test_the_end_waits_for_the_last_copies(
    run: RunDirectory,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    away = tmp_path / "away"
    with copied(run, SnapshotOptions(copy_to=f"file://{away}"), is_new=True):
        publish(run, a_snapshot(10))
        wait_for(lambda: (away / "run/snapshots/step-000000000010/manifest.json").exists())
        publish(run, a_snapshot(20))
        run.summary_json.write_text('{"steps": 20}')
        run.report_html.write_text("a page")
    assert (away / "run/report.html").read_text() == "a page"
    assert (away / "run/summary.json").read_bytes() == run.summary_json.read_bytes()
    said = of_summary(run)
    assert (said["complete"], said["newest_step"], said["failures"]) == (True, 20, 0)
    assert f"Resume from there: paceline resume file://{away}/run" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("fail", "AWS refused s3:PutObject: no (ServiceUnavailable)"),
        ("corrupt", "isn't what was sent: its bytes differ"),
        ("hang", "within 2 s"),
    ],
)
def test_a_bad_store_is_told_and_holds_nothing_up(
    run: RunDirectory,
    bucket: Account,
    capfd: pytest.CaptureFixture[str],
    fault: str,
    reason: str,
) -> None:
    options = SnapshotOptions(copy_to="s3://bucket/a", copy_wait_s=2)
    with copied(run, options, is_new=True):
        bucket.faults(s3=fault, on="state.json")
        publish(run, a_snapshot(10))
        wait_for(lambda: "a/run/snapshots/step-000000000010/tensors.safetensors" in keys(bucket))
        run.summary_json.write_text("{}")
        began_s = time.monotonic()
    assert time.monotonic() - began_s < patient(2 + 5)
    said, shown = of_summary(run), capfd.readouterr().err
    assert said["complete"] is False
    assert said["newest_step"] == -1
    assert reason in shown
    assert shown.count("copying to s3://bucket/a/run failed") == (fault != "hang")
    assert "a/run/snapshots/step-000000000010/manifest.json" not in keys(bucket)
    texts = [path.read_text() for path in run.path.glob("*.json")]
    assert _SECRET not in "".join((shown, *texts))


def test_a_store_that_hangs_is_asked_anew(
    run: RunDirectory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(copying, "CopySpec", partial(CopySpec, stalled_s=1.0))
    away = tmp_path / "away/run"
    with copied(run, SnapshotOptions(copy_to=f"file://{tmp_path}/away"), is_new=True):
        wait_for((away / "run.json").exists)
        # Whoever reads a pipe that nobody writes into waits for ever.
        owner = (away / OWNER).read_bytes()
        (away / OWNER).unlink()
        os.mkfifo(away / OWNER)
        publish(run, a_snapshot(10))
        wait_for(lambda: json.loads(run.copy_json.read_text())["failures"] == 1)
        (away / "owner").write_bytes(owner)
        (away / "owner").rename(away / OWNER)
        wait_for((away / "snapshots/step-000000000010/manifest.json").exists)
    assert "failed: the store hasn't answered for 1 s; the training goes on" in (
        capfd.readouterr().err
    )


def test_a_place_found_taken_after_a_failure_is_told(
    run: RunDirectory, tmp_path: Path, bucket: Account, capfd: pytest.CaptureFixture[str]
) -> None:
    options = SnapshotOptions(copy_to="s3://bucket/a", copy_wait_s=2)
    with copied(run, options, is_new=True):
        wait_for(lambda: f"a/run/{OWNER}" in keys(bucket))
    (tmp_path / "other").mkdir()
    other = a_run(tmp_path / "other" / "run")
    other.run_json.write_bytes(run.run_json.read_bytes())
    bucket.faults(s3="fail", on=OWNER)
    shown = ""
    with copied(other, options, is_new=False):  # returns once the store has failed
        bucket.faults()

        def told() -> bool:
            nonlocal shown
            shown += capfd.readouterr().err
            return "another training" in shown

        wait_for(told)
    assert shown.count("the training goes on") == 2


def test_a_place_that_cant_be_used_is_told_before_anything_starts(
    tmp_path: Path, bucket: Account
) -> None:
    run = RunDirectory.named(tmp_path / "new")
    run.create()
    options = SnapshotOptions(copy_to="s3://no-such-bucket/a")
    with (
        pytest.raises(UsageError, match=r"--copy-to: AWS refused.*NoSuchBucket"),
        copied(run, options, is_new=True),
    ):
        raise AssertionError("started")
    assert not run.path.exists()


def test_a_training_that_goes_on_isnt_stopped_by_it(
    run: RunDirectory, bucket: Account, capfd: pytest.CaptureFixture[str]
) -> None:
    options = SnapshotOptions(copy_to="s3://no-such-bucket/a", copy_wait_s=0.1)
    started = False
    with copied(run, options, is_new=False):
        started = True
    assert started
    assert "NoSuchBucket" in capfd.readouterr().err


def test_what_never_began_leaves_nothing_there(tmp_path: Path) -> None:
    run = RunDirectory.named(tmp_path / "new")
    run.create()
    with copied(run, SnapshotOptions(copy_to=f"file://{tmp_path}/away"), is_new=True):
        assert (tmp_path / "away/new" / OWNER).exists()
        run.discard()
    assert not (tmp_path / "away/new" / OWNER).exists()
    assert not run.path.exists()
