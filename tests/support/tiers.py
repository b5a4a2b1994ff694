"""Two tiers of tests: the core, of minutes on any machine, and what is slow.

A test is slow if it is marked so, or needs network namespaces or a browser. Marked are whole
commands and trainings beyond the first of each kind, benchmarks, real launchers, and variants that
cost seconds; what a package does is tested in the core, by units and by two ranks.
"""

from collections.abc import Iterable

import pytest

_SLOW = ("slow", "hosts", "browser")


def slow(*values: object) -> object:
    """Give a case of `pytest.mark.parametrize` that is for the slow tier."""
    return pytest.param(*values, marks=pytest.mark.slow)


def sort_into_tiers(items: Iterable[pytest.Item]) -> None:
    """Mark every test with its tier, `core` or `slow`."""
    for item in items:
        is_slow = any(item.get_closest_marker(name) is not None for name in _SLOW)
        item.add_marker(pytest.mark.slow if is_slow else pytest.mark.core)
