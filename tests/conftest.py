"""What holds for every test: it leaves nothing behind, and torch computes on one thread."""

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Before torch is imported: tests run beside each other, and forked ranks can't use a thread pool.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where programs of the system are; the PATH of an ordinary user, or after `su`, may lack these.
os.environ["PATH"] += os.pathsep + os.pathsep.join(["/usr/sbin", "/sbin"])

from paceline.launch.process_tree import spare_children_our_garbage
from paceline.launch.scratch import own_directory
from tests.launch.waiting import PATIENCE
from tests.support.leaks import find_leaks, look_around
from tests.support.tiers import sort_into_tiers

if "PYTEST_XDIST_WORKER" not in os.environ:
    # All that tests put there goes with this process, or at the next start if it is killed.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # failed tests' stay
    os.environ["TMPDIR"] = tempfile.tempdir = str(own_directory())
_TEST_LIMIT_S = 600.0
os.environ.setdefault("PYTEST_TIMEOUT", str(_TEST_LIMIT_S * PATIENCE))  # read by pytest-timeout
settings.register_profile("paceline", deadline=None)  # how long an example takes says nothing
settings.load_profile("paceline")


def pytest_configure() -> None:
    """Heed signals again that were ignored when the tests were started (nohup, `&` in a script).

    An ignored signal stays ignored in every process that a test starts, as it should; the tests of
    signals need it heeded.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    spare_children_our_garbage()


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test with its tier."""
    sort_into_tiers(items)


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
