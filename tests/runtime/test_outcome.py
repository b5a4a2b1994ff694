"""What a command says and gives at its end: sentences for people, exit codes for schedulers."""

import json
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from paceline.launch.errors.failures import FailureKind, WorkerFailure
from paceline.results.run_directory import RunDirectory
from paceline.runtime.outcome import announce_end, announce_failure

FAILURE = WorkerFailure(
    rank=1,
    host="h",
    step=3,
    exit_code=65,
    signal_name=None,
    kind="job",
    error_type="ValueError",
    message="wrong",
    traceback="Traceback\nValueError: wrong\n",
    operation="backward",
)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A training that has begun, with a snapshot of step 7."""
    made = RunDirectory.named(tmp_path / "run")
    made.make()
    made.run_json.write_text(json.dumps({"kind": "recipe", "recipe": "digits"}))
    snapshot = made.snapshots / "step-000000000007"
    snapshot.mkdir()
    (snapshot / "manifest.json").write_text('{"step": 7}')
    return made


def unwritten(run: RunDirectory) -> None:
    """Write no report."""


@pytest.mark.parametrize("summary", [{"stopped_because": "signal"}, None])
def test_a_stopped_training_ends_with_75_and_says_how_to_go_on(
    run: RunDirectory, summary: dict[str, object] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """75 is EX_TEMPFAIL of sysexits.h: schedulers start such a job again."""
    if summary is not None:
        run.summary_json.write_text(json.dumps(summary))
    assert announce_end(run, interrupted=True, write=unwritten) == 75
    said = capsys.readouterr().out
    assert f"Stopped. Resume from step 7: paceline resume {run.path}" in said


def test_a_training_that_ended_before_the_signal_is_done(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = {"steps": 5, "epochs": 1, "train_time_s": 2.0, "images_per_s": 20.0}
    run.summary_json.write_text(json.dumps({"stopped_because": "epochs", **figures}))
    assert announce_end(run, interrupted=True, write=unwritten) == 0
    assert "Finished 1 of 1 epoch. 5 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ended", "kind", "line"),
    [
        ("epochs", "recipe", "Finished 5 of 5 epochs. 115 steps in 2 min 9 s, 20 images/s"),
        ("target", "recipe", "Target accuracy reached after 5 of 15 epochs. 115 steps"),
        ("target", "script", "Target accuracy reached after 5 epochs. 115 steps"),
        ("time", "recipe", "Finished 5 of 15 epochs: the time budget is used up. 115 steps"),
        ("script", "script", "Finished 5 epochs: the script's loop is over. 115 steps in 2 min"),
        ("epochs", "script", "Finished 5 of 5 epochs. 115 steps in 2 min 9 s, 20 samples/s"),
    ],
)
def test_how_an_end_is_told(
    ended: str, kind: str, line: str, run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    unit = {"sample_unit": "images" if kind == "recipe" else "samples"}
    run.run_json.write_text(json.dumps({"kind": kind, "settings": {"epochs": 15}, "derived": unit}))
    figures = {"steps": 115, "epochs": 5, "train_time_s": 129.0, "images_per_s": 20.0}
    run.summary_json.write_text(json.dumps({"stopped_because": ended, **figures}))
    assert announce_end(run, interrupted=False, write=unwritten) == 0
    assert capsys.readouterr().out.startswith(line)


def test_the_end_fits_a_terminal(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = {"val_loss": 0.0843, "val_accuracy": 0.98, "best_val_accuracy": 0.98, "best_epoch": 3}
    figures = {"steps": 5, "epochs": 3, "train_time_s": 2.0, "images_per_s": 20.0, **judged}
    run.summary_json.write_text(
        json.dumps({"stopped_because": "epochs", "val_samples": 355, **figures})
    )
    whole = "loss 0.0843, accuracy 98.00 % (best 98.00 % in epoch 3) on 355 samples"
    announce_end(run, interrupted=False, write=unwritten)
    assert whole in capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    announce_end(run, interrupted=False, write=unwritten)
    lines = capsys.readouterr().out.splitlines()
    first, second = next(pair for pair in pairwise(lines) if "validation" in pair[0])
    assert len(first) <= 80
    assert second.startswith(" " * len("  validation  "))
    assert f"{first.strip()} {second.strip()}" == f"validation  {whole}"


@pytest.mark.parametrize(
    ("kind", "step", "code", "goes_on"),
    [
        ("infrastructure", None, 70, True),
        ("infrastructure", 3, 70, True),
        ("job", 3, 65, True),  # the data or the settings may be mended
        ("job", None, 65, False),  # before the first step: it would end alike
        ("usage", None, 2, False),
    ],
)
def test_a_failure_says_how_to_go_on_where_that_may_help(
    run: RunDirectory,
    kind: FailureKind,
    step: int | None,
    code: int,
    goes_on: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cause = replace(FAILURE, kind=kind, step=step)
    assert announce_failure(run, [cause], write=unwritten) == code
    said = capsys.readouterr().err
    assert "ValueError: wrong" in said
    assert ("Resume from the newest good snapshot: paceline resume" in said) is goes_on
