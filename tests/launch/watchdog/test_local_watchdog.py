"""Workers that hang are told of, ended and started again, by a real launch."""

import pytest

from paceline.launch.watchdog.hang_detector import HangLimits
from paceline.results.run_directory import log_path
from tests.launch.conftest import fork_server, launch
from tests.launch.launching import Launch

__all__ = ["fork_server", "launch"]

pytestmark = pytest.mark.ranks


@pytest.mark.slow
def test_hangs_of_all_kinds_are_ended_and_the_training_goes_on(launch: Launch) -> None:
    launch.max_restarts = 3
    launch.hang = HangLimits(least_s=0.8)
    outcome = launch("hang", "stop lock late")
    assert outcome.results == {0: "attempt 2", 1: "attempt 2"}
    assert outcome.restarts == 2
    reports = [line for line in launch.lines if line.startswith("The training hangs")]
    restarts = [line for line in launch.lines if "All workers start again" in line]
    assert len(reports) == len(restarts) == 2
    stopped, locked = reports
    assert "Missing is rank 1" in stopped
    assert "stopped by a signal" in stopped
    assert "step 20" in stopped
    assert "Missing is rank 1" in locked
    assert "in hang" in locked
    assert "/re/__init__.py" in locked  # its own stack, though it keeps the interpreter to itself
    for number, text in enumerate(reports):
        assert "rank 0 on" in text
        assert "entries.py:" in text  # where the others wait
        assert (launch.log_dir / f"hang-{number}.txt").exists()
        assert f"so far {number + 1} restart" in restarts[number]


@pytest.mark.slow
def test_workers_in_different_collectives_are_the_jobs_fault(launch: Launch) -> None:
    launch.max_restarts = 3
    launch.hang = HangLimits(least_s=0.8)
    outcome = launch("hang", "skip late")
    assert [(failure.rank, failure.kind) for failure in outcome.failures] == [
        (0, "job"),
        (1, "job"),
    ]
    (skipped,) = [line for line in launch.lines if line.startswith("The training hangs")]
    assert "Missing is rank 1" in skipped
    assert "in another collective than the others" in skipped
    assert "collective 20 (all-gather)" in skipped
    assert not [line for line in launch.lines if "start again" in line]


def test_a_hang_that_goes_on_hanging_is_the_failure_of_the_launch(launch: Launch) -> None:
    launch.hang = HangLimits(least_s=0.8)
    outcome = launch("hang", "stop")
    assert outcome.failures[0].is_hang
    assert (outcome.failures[0].rank, outcome.failures[0].kind) == (1, "infrastructure")
    assert (launch.log_dir / "failure-rank-1.json").exists()


@pytest.mark.slow
def test_without_limits_nobody_looks(launch: Launch) -> None:
    outcome = launch("hang", "late")
    assert set(outcome.results) == {0, 1}
    assert launch.lines == []
    assert log_path(launch.log_dir, 0).exists()
