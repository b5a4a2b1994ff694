import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from paceline.launch import forkserver
from tests.launch.waiting import alive


@pytest.fixture(autouse=True)
def _released() -> Iterator[None]:
    forkserver.release()
    yield
    forkserver.release()


def _pid() -> int:
    pid = forkserver.server_pid()
    assert pid is not None
    return pid


def test_the_environment_and_the_signals_stay_as_they_are() -> None:
    environment = dict(os.environ)
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    forkserver.prepare((), 1)
    assert dict(os.environ) == environment
    after = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert after == handlers


def test_it_is_kept_while_it_serves_and_replaced_otherwise() -> None:
    forkserver.prepare(["json"], 1)
    first = _pid()
    forkserver.prepare((), 1)
    assert _pid() == first
    forkserver.prepare(["json"], 2)
    second = _pid()
    assert second != first
    assert not alive(first)
    forkserver.prepare(["decimal"], 2)
    assert _pid() != second


def test_one_that_died_is_replaced() -> None:
    forkserver.prepare((), 1)
    first = _pid()
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    forkserver.prepare((), 1)
    assert _pid() != first


def test_release_ends_it_and_can_be_repeated() -> None:
    forkserver.prepare((), 1)
    first = _pid()
    forkserver.release()
    forkserver.release()
    assert not alive(first)
    assert forkserver.server_pid() is None


def test_preparing_imports_no_torch() -> None:
    code = (
        "import sys\n"
        "from paceline.launch import local, options, placement\n"
        "local.prepare((), 1)\n"
        "print('torch' in sys.modules)\n"
        "from paceline.launch import forkserver\n"
        "forkserver.release()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (result.stdout, result.stderr) == ("False\n", "")
