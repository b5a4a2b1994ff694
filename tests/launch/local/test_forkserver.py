import multiprocessing.resource_tracker
import multiprocessing.util
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from paceline.launch.local import forkserver
from tests.launch.waiting import alive, until

_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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
    handlers = [signal.getsignal(number) for number in _STOP]
    forkserver.prepare((), 1)
    assert dict(os.environ) == environment
    assert [signal.getsignal(number) for number in _STOP] == handlers
    assert not set(_STOP) & signal.pthread_sigmask(signal.SIG_BLOCK, ())


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


def test_a_hash_seed_holds_for_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    forkserver.prepare((), 1)
    first = _pid()
    with forkserver.hash_seed_is("1"):
        forkserver.prepare((), 1)
        second = _pid()
        environment = Path(f"/proc/{second}/environ")  # empty until the process is Python's
        until(lambda: b"PYTHONHASHSEED=1" in environment.read_bytes().split(b"\0"))
    assert second != first
    assert "PYTHONHASHSEED" not in os.environ
    monkeypatch.setenv("PYTHONHASHSEED", "7")  # the user's counts
    with forkserver.hash_seed_is("1"):
        assert os.environ["PYTHONHASHSEED"] == "7"


@pytest.mark.parametrize(
    ("given", "has"),
    [
        (None, "glibc.malloc.hugetlb=1"),
        ("glibc.malloc.arena_max=8", "glibc.malloc.arena_max=8:glibc.malloc.hugetlb=1"),
        ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),  # the user's counts
    ],
)
def test_workers_ask_the_kernel_for_huge_pages(
    given: str | None, has: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if given is not None:
        monkeypatch.setenv("GLIBC_TUNABLES", given)
    forkserver.prepare((), 1)
    environment = Path(f"/proc/{_pid()}/environ")  # empty until the process is Python's
    tunables = f"GLIBC_TUNABLES={has}".encode().split(b":")  # where glibc cuts it
    until(lambda: set(tunables) <= set(environment.read_bytes().split(b"\0")))
    assert os.environ.get("GLIBC_TUNABLES") == given


_IN_HUGE_PAGES = """
import ctypes
from pathlib import Path

library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
library.mallopt(-3, 32 << 20)
size = 16 << 20
ctypes.memset(library.malloc(ctypes.c_size_t(size)), 1, size)
parts = Path("/proc/self/smaps").read_text().split("[heap]")[1:]
print(any(" hg" in part.split("VmFlags:")[1].splitlines()[0] for part in parts))
"""
_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    not _THP.exists() or "[madvise]" not in _THP.read_text(), reason="huge pages for who asks"
)
@pytest.mark.skipif(platform.libc_ver() < ("glibc", "2.35"), reason="glibc 2.35")
@pytest.mark.parametrize(("tunables", "has"), [("", True), ("glibc.malloc.hugetlb=0", False)])
def test_memory_is_to_come_in_huge_pages_unless_somebody_says_no(tunables: str, has: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _IN_HUGE_PAGES],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"GLIBC_TUNABLES": forkserver.with_huge_pages(tunables)},
    )
    assert done.stdout.split() == [str(has)]


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


@pytest.mark.parametrize("given_up", [True, False])
def test_a_start_that_was_given_up_ends_without_a_traceback(given_up: bool) -> None:
    """Its semaphores are gone by the time that it is handed them; what else fails is shown."""
    code = (
        "import multiprocessing, sys, _multiprocessing\n"
        "from paceline.launch.local import forkserver\n"
        "forkserver.prepare((), 1)\n"
        "start = multiprocessing.get_context('forkserver')\n"
        "lock = start.Lock()\n"
        "_multiprocessing.sem_unlink(lock._semlock.name)\n"
        "class Other:\n"
        "    def __reduce__(self): return open, ('/nowhere/at/all',)\n"
        f"worker = start.Process(target=print, args=(lock if {given_up} else Other(),))\n"
        "worker.start()\n"
        "worker.join()\n"
        "print(worker.exitcode)\n"
        "print('exit:', file=sys.stderr, flush=True)\n"  # where the lock itself complains
        "forkserver.release()\n"
    )
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == "1\n"
    shown = result.stderr.partition("exit:")[0]
    assert ("Traceback" in shown) is not given_up


def test_preparing_imports_no_torch() -> None:
    code = (
        "import sys\n"
        "from paceline.launch import options, worker_count\n"
        "from paceline.launch.local import forkserver, launcher\n"
        "forkserver.prepare((), 1)\n"
        "print('torch' in sys.modules)\n"
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


def test_a_signal_to_stop_that_comes_meanwhile_is_only_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Held back while the server starts; it reaches the launcher's handler, not the server."""
    multiprocessing.resource_tracker.ensure_running()  # so that the server alone is started
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    start = multiprocessing.util.spawnv_passfds

    def start_amid_signals(path: bytes, words: Sequence[str], descriptors: Sequence[int]) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        pid: int = start(path, words, descriptors)
        os.kill(pid, signal.SIGTERM)  # it has hardly begun
        os.kill(pid, signal.SIGHUP)
        return pid

    monkeypatch.setattr(multiprocessing.util, "spawnv_passfds", start_amid_signals)
    try:
        forkserver.prepare((), 1)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM]
    server = _pid()
    until(lambda: _all_in(server, "SigIgn") and not _any_in(server, "SigBlk"))


def _mask(pid: int, field: str) -> int:
    """Read one of a process's signal masks, as proc(5) has them; no signal where it has ended."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next((line.split()[1] for line in lines if line.startswith(field)), "0"), 16)


def _all_in(pid: int, field: str) -> bool:
    return all(_mask(pid, field) >> (number - 1) & 1 for number in _STOP)


def _any_in(pid: int, field: str) -> bool:
    return any(_mask(pid, field) >> (number - 1) & 1 for number in _STOP)
