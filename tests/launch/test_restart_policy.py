import pytest

from paceline.launch.errors.failures import FailureKind
from paceline.launch.heartbeat import Reading
from paceline.launch.restart_policy import RestartBudget, StopGrace


@pytest.mark.parametrize("kind", ["usage", "job"])
def test_what_would_fail_again_is_not_retried(kind: FailureKind) -> None:
    assert RestartBudget.full(3, 0).spend(kind, 100) is None


def test_without_progress_the_budget_is_spent() -> None:
    budget: RestartBudget | None = RestartBudget.full(2, -1)
    left = []
    for _ in range(4):  # not for as long as there is some: that might be for ever
        left.append(budget and budget.left)
        budget = budget and budget.spend("infrastructure", -1)
    assert left == [2, 1, 0, None]


def test_progress_refills_it() -> None:
    budget = RestartBudget.full(1, 5)
    for step in (6, 7, 20):
        spent = budget.spend("infrastructure", step)
        assert spent is not None
        assert (spent.left, spent.progress) == (0, step)
        budget = spent
    assert budget.spend("infrastructure", 20) is None


def test_a_step_back_is_not_progress() -> None:
    budget = RestartBudget.full(2, 50).spend("infrastructure", 40)
    assert budget is not None
    assert (budget.left, budget.progress) == (1, 50)


def test_zero_restarts_means_none() -> None:
    assert RestartBudget.full(0, -1).spend("infrastructure", 10) is None


def test_hangs_are_counted_apart() -> None:
    budget = RestartBudget.full(3, -1)
    for is_hang in (True, False, True):
        left = budget.spend("infrastructure", -1, is_hang=is_hang)
        assert left is not None
        budget = left
    assert (budget.left, budget.hangs) == (0, 2)
    assert budget.spend("infrastructure", -1, is_hang=True) is None


def _worker(stop_s: float, operation: str = "step") -> Reading:
    return Reading(step=7, operation=operation, lap_s=(stop_s - 2.0) / 2)


def test_the_time_to_stop_follows_the_slowest_worker_within_limits() -> None:
    grace = StopGrace(least_s=3.5, most_s=60.0)
    assert grace.for_workers([]) == 3.5
    assert grace.for_workers([_worker(2.0), _worker(3.0)]) == 3.5
    assert grace.for_workers([_worker(21.5), _worker(8.0)]) == 21.5
    assert grace.for_workers([_worker(200.0)]) == 60.0


def test_a_snapshot_that_is_being_written_has_all_the_time_there_is() -> None:
    grace, workers = StopGrace(least_s=3.5, most_s=60.0), [_worker(5.0, "snapshot"), _worker(9.0)]
    assert grace.for_workers(workers) == 9.0
    assert grace.for_workers(workers, is_late=True) == 60.0
    assert StopGrace(least_s=4.0, most_s=4.0).for_workers(workers, is_late=True) == 4.0


def test_a_step_of_ten_seconds_and_its_snapshot_fit_into_the_time_to_stop() -> None:
    # A signal comes right after an exchange: a whole step is left, and the snapshot after it.
    assert Reading(lap_s=9.6, snapshot_s=4.0).stop_s > 9.6 + 4.0
    assert Reading(operation="compile").stop_s > 60.0
    assert Reading(operation="evaluate").stop_s > 30.0
