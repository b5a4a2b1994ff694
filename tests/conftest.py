"""What holds for every test: it leaves nothing behind, and torch computes on one thread."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before torch is imported: tests run beside each other, and forked ranks can't use a thread pool.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.support.leaks import find_leaks, look_around


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves processes, threads, variables, groups, settings or open files."""
    scratch = None
    if "tmp_path" in request.fixturenames:
        scratch = Path(request.getfixturevalue("tmp_path"))
    before = look_around()
    yield
    leaks = find_leaks(before, scratch)
    if leaks:
        pytest.fail("the test left behind: " + "; ".join(leaks), pytrace=False)
