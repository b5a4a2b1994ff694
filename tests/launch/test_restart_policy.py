import pytest

from paceline.launch.failures import FailureKind
from paceline.launch.restart_policy import RestartBudget


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
