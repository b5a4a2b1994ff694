"""All sinks, each with the real package, through the process that feeds it beside a training."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.errors import ExitCode
from paceline.metrics.options import MetricsOptions
from paceline.options import entry_points
from paceline.runtime import tracking
from paceline.runtime.tracking import tracked
from paceline.tracking import registry
from paceline.tracking.follow import TrackerNote
from paceline.tracking.rows import Cursor
from tests.launch.test_launchers import install
from tests.launch.waiting import patient, until
from tests.support.needs import need
from tests.tracking.runs import begun, ended, epoch, step, truncate
from tests.tracking.trackers import TRACKERS, Tracker, package

PLUGIN = Path(__file__).parent / "plugin"
"""A package of somebody else's, with a sink called jsonl."""


def forget() -> None:
    registry.trackers.cache_clear()
    entry_points._installed.cache_clear()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    place = tmp_path / "site"
    install(PLUGIN, place)
    monkeypatch.syspath_prepend(place)
    paths = [str(place), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    forget()
    yield place
    sys.modules.pop("paceline_jsonl", None)
    forget()


@pytest.fixture(params=TRACKERS)
def name(request: pytest.FixtureRequest, site: Path) -> str:
    return str(request.param)


@pytest.fixture
def tracker(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tracker:
    found = TRACKERS[name]
    if found.needs is not None:
        need(found.needs)
    for variable, value in found.environment(tmp_path).items():
        monkeypatch.setenv(variable, value)
    return found


def test_every_tracker_is_driven(site: Path) -> None:
    assert [*list(TRACKERS)[1:], "jsonl"] == list(registry.trackers())


@pytest.mark.slow
def test_a_run_and_its_resume_are_one_run_of_the_tracker(
    name: str, tracker: Tracker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("LIMIT_S", "CONNECT_S"):
        monkeypatch.setattr(tracking, limit, patient(60.0))
    run, options = begun(tmp_path / "run"), MetricsOptions(tracker=(name,))

    def has(cursor: Cursor) -> bool:
        note = TrackerNote.read(run, name)
        return note is not None and note.cursor == cursor

    # Rows arrive while the training runs; it is stopped before its end.
    with run.lock(), tracked(run, options):
        step(run, 2, 0.9)
        until(lambda: has(Cursor(step=2)), patient(90.0))
        step(run, 4, 0.8)
        epoch(run, 1, 0.85)
        until(lambda: has(Cursor(step=4, epoch=1)), patient(90.0))
    note = TrackerNote.read(run, name)
    assert note is not None
    assert note.is_complete
    assert tracker.read(tmp_path, note.id).endings == [tracker.endings[0]]
    # It goes on from step 2: steps up to 4 are trained again, and aren't sent again.
    truncate(run, epochs=0, steps=1)
    with run.lock(), tracked(run, options):
        for number in (4, 6):
            step(run, number, 0.1 * number)
        epoch(run, 1, 0.2)
        epoch(run, 2, 0.5)
        ended(run)
    resumed = TrackerNote.read(run, name)
    assert resumed is not None
    assert (resumed.id, resumed.is_complete) == (note.id, True)
    found = tracker.read(tmp_path, note.id)
    assert found.points["train/loss"] == [(2, 0.9), (4, 0.8), (6, pytest.approx(0.6))]
    assert found.points["val/accuracy"] == [(4, 0.1), (8, 0.2)]
    assert found.points["epoch/train_loss"] == [(4, 0.85), (8, 0.5)]
    assert str(found.config["epochs"]) == "2"
    assert str(found.config["dropout"]) == "0.2"
    assert found.summary["best_val_accuracy"] > 0.9
    assert found.endings[-1] == tracker.endings[1]


@pytest.mark.slow
def test_mlflow_goes_on_in_its_first_store_unless_the_user_names_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need(package("mlflow", "MLflow"))
    for limit in ("LIMIT_S", "CONNECT_S"):
        monkeypatch.setattr(tracking, limit, patient(60.0))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # for the client that reads it back
    run = begun(tmp_path / "run")

    def trained(folder: str, number: int) -> TrackerNote:
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        with run.lock(), tracked(run, MetricsOptions(tracker=("mlflow",))):
            step(run, number, 0.1 * number)
        note = TrackerNote.read(run, "mlflow")
        assert note is not None
        assert note.is_complete
        return note

    first, second = trained("first", 2), trained("second", 4)
    assert "look: MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri " in first.where
    assert second.id == first.id
    assert str(tmp_path / "first") in second.kept_in
    assert not list((tmp_path / "second").iterdir())
    # What the user says counts before that; there is nothing of the run there.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    third = trained("third", 6)
    assert third.id != first.id
    found = TRACKERS["mlflow"].read(tmp_path, third.id)
    assert [number for number, _ in found.points["train/loss"]] == [2, 4, 6]


@pytest.mark.parametrize("connects", [False, True])
def test_a_tracker_that_was_never_reached_is_hardly_waited_for(
    connects: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name, limit_s in {"LIMIT_S": 2.0, "CONNECT_S": 0.0, "_UNREACHED_S": 0.1}.items():
        monkeypatch.setattr(tracking, name, limit_s)
    monkeypatch.setattr(tracking, "_SPARE_S", 0.0)
    run = begun(tmp_path / "run")
    TrackerNote(id="r1", where="", cursor=Cursor()).write(run, "stuck")  # of an earlier start
    started: list[object] = []

    def stuck(*_: object, **__: object) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        process = popen(command, stdin=subprocess.PIPE, start_new_session=True)
        started.append(process)
        return process

    popen = subprocess.Popen
    with monkeypatch.context() as patched, run.lock():
        patched.setattr(subprocess, "Popen", stuck)
        with tracked(run, MetricsOptions(tracker=("stuck",))):
            if connects:
                TrackerNote(id="r1", where="", cursor=Cursor()).write(run, "stuck")
            ended(run)
            began_s = time.monotonic()
        took_s = time.monotonic() - began_s
    assert len(started) == 1
    said = capfd.readouterr().err
    assert (took_s >= 2.0) == connects, took_s
    assert ("didn't get everything" in said) == connects
    assert ("nothing of this start was sent" in said) == (not connects)


def paceline(*words: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "paceline", *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=patient(120),
    )


@pytest.mark.slow
def test_a_training_is_tracked_and_sent_elsewhere_afterwards(site: Path, tmp_path: Path) -> None:
    words = ["--device", "cpu", "--threads", "1", "--workers", "1", "--run-dir", "run"]
    sent = ["--tracker", "jsonl", "--epochs", "1"]
    done = paceline("train", "digits", *words, *sent, cwd=tmp_path)
    assert done.returncode == ExitCode.DONE, done.stderr
    assert f"jsonl: {tmp_path}/run/jsonl/run.jsonl" in done.stderr
    found = TRACKERS["jsonl"].read(tmp_path, "run")
    assert [step for step, _ in found.points["val/loss"]] == [23]
    assert found.endings == ["finished"]


@pytest.mark.slow
def test_a_tracker_that_nobody_reaches_stops_nothing_and_gets_no_secret_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    need(*(need for need in [TRACKERS["mlflow"].needs] if need is not None))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:hunter22@127.0.0.1:9/base")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    run = begun(tmp_path / "run")
    with run.lock(), tracked(run, MetricsOptions(tracker=("mlflow",))):
        until(lambda: run.tracker_log.exists() and "refused" in run.tracker_log.read_text(), 60.0)
        ended(run)
    shown = capfd.readouterr()
    assert "mlflow: " in shown.err
    assert "It is tried again" in shown.err
    assert "mlflow couldn't be reached, and nothing of this start was sent" in shown.err
    assert "steps.csv and metrics.csv have everything" in shown.err
    texts = [path.read_text(errors="replace") for path in run.path.rglob("*") if path.is_file()]
    assert not any("hunter22" in text for text in [*texts, shown.out, shown.err])


def test_tags_of_a_run_are_tags_of_mlflow() -> None:
    need(package("mlflow", "MLflow"))
    from paceline.tracking.mlflow_sink import _tag

    made = [(_tag(tag).key, _tag(tag).value) for tag in ("sweep", "team=vision", "a@b#c", "=x")]
    assert made == [("sweep", "true"), ("team", "vision"), ("a_b_c", "true"), ("tag", "x")]
