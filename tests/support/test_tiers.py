"""Every test is in one tier, and in the core is none that needs more than Python."""

from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.support.tiers import slow, sort_into_tiers


def names_of(item: pytest.Item) -> set[str]:
    return {mark.name for mark in item.iter_markers()} & {"core", "slow", "hosts", "browser"}


def test_every_test_of_this_session_has_one_tier(request: pytest.FixtureRequest) -> None:
    for item in request.session.items:
        assert len(names_of(item) & {"core", "slow"}) == 1, item.nodeid


@pytest.mark.parametrize("mark", ["slow", "hosts", "browser", "ranks"])
def test_what_needs_more_than_python_is_slow(mark: str, request: pytest.FixtureRequest) -> None:
    item = pytest.Function.from_parent(request.node.parent, name="made", callobj=lambda: None)
    item.add_marker(mark)
    sort_into_tiers([item])
    assert names_of(item) & {"core", "slow"} == ({"core"} if mark == "ranks" else {"slow"})


@pytest.mark.parametrize("case", [slow("far")])
def test_a_case_can_be_slow(case: str, request: pytest.FixtureRequest) -> None:
    assert case == "far"
    assert "slow" in names_of(request.node)


@pytest.mark.core_cases(2)
@pytest.mark.parametrize("case", range(3))
def test_cases_after_the_first_ones_are_slow(case: int, request: pytest.FixtureRequest) -> None:
    assert ("slow" in names_of(request.node)) == (case == 2)


def test_no_directory_of_tests_is_left_out(request: pytest.FixtureRequest) -> None:
    """The usual list of directories to pass over has names, such as `dist`, that packages have."""
    passed_over = request.config.getini("norecursedirs")
    names = {path.parent.name for path in Path(__file__).parents[1].rglob("test_*.py")}
    assert not [name for name in names if any(fnmatch(name, each) for each in passed_over)]
