"""The first sentence of the page says how the run ended."""

import json
from collections.abc import Callable

import pytest

from paceline.report.load_run import read_run
from paceline.report.run_outcome import describe_ending, describe_exceeded
from paceline.results.run_directory import RunDirectory

MakeRun = Callable[..., RunDirectory]


def change_settings(run: RunDirectory, **settings: object) -> None:
    description = json.loads(run.run_json.read_text())
    description["settings"].update(settings)
    run.run_json.write_text(json.dumps(description))


@pytest.mark.parametrize(
    ("because", "done", "settings", "sentence"),
    [
        ("epochs", 20, {}, "finished all 20 epochs"),
        ("target", 12, {}, "target accuracy 97.5 % reached, after 12 of 20 epochs"),
        (
            "target",
            12,
            {"patience": 3},
            "target accuracy 97.5 % reached 3 epochs in a row, after 12 of 20 epochs",
        ),
        (
            "patience",
            12,
            {"early_stopping": 4},
            "stopped after 12 of 20 epochs: no better validation result for 4 epochs",
        ),
        (
            "time",
            12,
            {"time_budget": "2h"},
            "stopped after 12 of 20 epochs: time budget of 2h used",
        ),
        ("signal", 12, {}, "interrupted by a signal in epoch 13, at step 276"),
        ("script", 12, {}, "stopped after 12 of 20 epochs: the script's loop is over"),
        ("moon phase", 12, {}, "stopped after 12 of 20 epochs: moon phase"),
    ],
)
def test_sentence(
    make_run: MakeRun, because: str, done: int, settings: dict[str, object], sentence: str
) -> None:
    run = make_run(done=done, because=because)
    change_settings(run, **settings)
    ending = describe_ending(read_run(run))
    assert ending.sentence == sentence
    assert bool(ending.resume) == (because == "signal")


def test_the_resume_command_can_be_pasted(make_run: MakeRun) -> None:
    run = make_run(because="signal")
    moved = RunDirectory(run.path.rename(run.path.with_name("a run")))
    assert describe_ending(read_run(moved)).resume == f"paceline resume '{moved.path}'"


def test_running(make_run: MakeRun) -> None:
    run = make_run(done=5, because=None)
    with run.lock():
        ending = describe_ending(read_run(run))
    assert ending.state == "running"
    assert ending.sentence == "still running when this page was written, 5 of 20 epochs done"


def test_a_killed_launcher_says_nothing_but_its_lock_is_free(make_run: MakeRun) -> None:
    run = make_run(done=5, because=None)
    with run.lock():
        pass
    ending = describe_ending(read_run(run))
    assert ending.state == "interrupted"
    assert ending.sentence == (
        "interrupted without a word (its launcher was killed), 5 of 20 epochs done"
    )
    assert ending.resume == f"paceline resume {run.path}"
    # Within its sixth epoch.
    rows = "epoch,step\n6,116\n6,1121\n"
    run.steps_csv.write_text(rows)
    assert describe_ending(read_run(run)).sentence.endswith(
        "5 of 20 epochs done, step 1,121 reached"
    )


def test_failure_names_rank_host_step_and_error(make_run: MakeRun) -> None:
    run = make_run(because=None)
    record = {
        "rank": 1,
        "host": "node-7",
        "step": 1037,
        "kind": "job",
        "error_type": "ValueError",
        "message": "bad label\nmore",
        "operation": "backward",
    }
    (run.logs / "failure-rank-1.json").write_text(json.dumps(record))
    ending = describe_ending(read_run(run))
    assert ending.state == "failed"
    wanted = "failed: rank 1 on host node-7 at step 1,037, in backward: ValueError: bad label"
    assert ending.sentence == wanted


def test_nothing_to_resume_without_a_snapshot(make_run: MakeRun) -> None:
    run = make_run(because="signal")
    for snapshot in run.snapshots.glob("step-*"):
        snapshot.rename(snapshot.with_name(f"{snapshot.name}.damaged"))
    assert describe_ending(read_run(run)).resume == ""


def test_by_how_much_a_time_budget_was_exceeded_and_by_what() -> None:
    kept = {"budget_s": 30.0, "used_s": 30.3, "evaluation_s": 5.0, "kept_back_s": 7.0}
    assert not describe_exceeded(kept)
    assert not describe_exceeded(None)
    over = {"budget_s": 30, "used_s": 93.0, "kept_back_s": 15.0}
    parts = {"evaluation_s": 12.0, "test_s": 60.0, "snapshot_s": 0.1}
    assert describe_exceeded(over | parts) == (
        "exceeded by 1 min 3 s: evaluating on the test set took 1 min, the last evaluation "
        "took 12 s, "
        "15 s had been kept back for the end"
    )
