"""Two runs of pytest that are one: what has passed in the first needn't run in the second.

The first writes the names of its tests to the file PACELINE_TEST_PASSED, the second leaves those in
the file PACELINE_TEST_PASSED_BEFORE out.
"""

import os
import re
from pathlib import Path

import pytest


def note_passed(report: pytest.TestReport) -> None:
    """Add a test to the file, if there is to be one. A run with a failure counts for nothing."""
    path = os.environ.get("PACELINE_TEST_PASSED")
    if path and report.when == "call" and report.passed:
        with Path(path).open("a") as file:
            file.write(f"{_without_group(report.nodeid)}\n")


def leave_out_passed(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take out of a collection what has passed before."""
    path = os.environ.get("PACELINE_TEST_PASSED_BEFORE")
    if not path:
        return
    passed = set(Path(path).read_text().splitlines())
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
    items[:] = [item for item in items if item.nodeid not in passed]


def _without_group(name: str) -> str:
    """Take off what xdist adds to a test's name: the `@hosts` of `test_it[a@b]@hosts`."""
    return re.sub(r"@[\w-]+$", "", name)
