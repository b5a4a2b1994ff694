"""Two tiers of tests: the core, of minutes on any machine, and what is slow.

A test is slow if it is marked so, or needs network namespaces, a browser or the pretend device.
Marked are whole
commands and trainings beyond the first of each kind, benchmarks, real launchers, and variants that
cost seconds; what a package does is tested in the core, by units and by two ranks.
"""

from collections import Counter
from collections.abc import Iterable

import pytest

_SLOW = ("slow", "hosts", "browser", "pretend_gpu")


def slow(*values: object) -> object:
    """Give a case of `pytest.mark.parametrize` that is for the slow tier."""
    return pytest.param(*values, marks=pytest.mark.slow)


def sort_into_tiers(items: Iterable[pytest.Item]) -> None:
    """Mark every test with its tier, `core` or `slow`.

    With `@pytest.mark.core_cases(3)` only the first three cases of a test are of the core.
    """
    cases: Counter[str] = Counter()
    for item in sorted(items, key=_case):  # they come in a random order
        function = item.nodeid.partition("[")[0]
        cases[function] += 1
        is_slow = any(item.get_closest_marker(name) is not None for name in _SLOW)
        most = item.get_closest_marker("core_cases")
        is_slow = is_slow or (most is not None and cases[function] > most.args[0])
        item.add_marker(pytest.mark.slow if is_slow else pytest.mark.core)


def _case(item: pytest.Item) -> tuple[int, ...]:
    """Give an item's place among the cases of its test: of each parameter, which value it has."""
    found = getattr(item, "callspec", None)
    return () if found is None else tuple(found.indices.values())
