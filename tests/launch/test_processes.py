import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.launch import processes
from paceline.launch.heartbeat import Reading
from paceline.launch.process_tree import adopt_orphans
from paceline.launch.processes import Worker, WorkerSupervisor, descendants, reap
from paceline.launch.restart_policy import StopGrace
from tests.launch.waiting import alive, patient, until

_STUBBORN = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(); input()"
_WILLING = "print(); input()"


class Child:
    """A process with a descriptor that becomes readable when it ends."""

    def __init__(self, code: str) -> None:
        self.sentinel, writer = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[writer],
        )
        os.close(writer)
        assert self.process.stdout is not None
        self.process.stdout.readline()  # it runs, and its handlers are set

    @property
    def worker(self) -> Worker:
        return Worker(self.process.pid, self.sentinel)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
        os.close(self.sentinel)


@pytest.fixture
def children() -> Iterator[list[Child]]:
    started: list[Child] = []
    yield started
    for child in started:
        child.end()


def _guard(children: list[Child], done: bool = False) -> WorkerSupervisor:
    workers = {rank: child.worker for rank, child in enumerate(children)}
    return WorkerSupervisor(workers, delivered=lambda rank: done)


def test_a_request_to_stop_reaches_all_and_kills_the_rest(children: list[Child]) -> None:
    children += [Child(_WILLING), Child(_STUBBORN)]
    guard = _guard(children)
    guard.request_stop(time.monotonic() - 3.0, StopGrace(least_s=3.3))
    assert children[0].process.wait(timeout=patient(60)) == -signal.SIGTERM
    assert children[1].process.wait(timeout=patient(60)) == -signal.SIGKILL
    guard.close()
    assert 1 in guard.killed


def test_workers_that_need_longer_to_stop_get_it_and_the_user_is_told(
    children: list[Child],
) -> None:
    children.append(Child(_STUBBORN))
    said: list[str] = []
    readings = [Reading(step=4, operation="step", lap_s=20.0, snapshot_s=4.0)]
    workers = {0: children[0].worker}
    guard = WorkerSupervisor(workers, lambda rank: False, lambda: readings, said.append)
    # Asked 40 s ago with 3.5 s at least: over for long, but for what the worker needs.
    guard.request_stop(time.monotonic() - 40.0, StopGrace())
    until(lambda: bool(said))
    assert said == [
        "Finishing the step and writing a snapshot, up to 10 s; Ctrl-C again stops at once"
    ]
    assert guard.killed == frozenset()
    guard.kill()
    assert children[0].process.wait(timeout=patient(60)) == -signal.SIGKILL
    guard.close()


def test_a_worker_that_writes_a_snapshot_when_its_time_is_over_has_more(
    children: list[Child],
) -> None:
    children.append(Child(_STUBBORN))
    said: list[str] = []
    readings = [Reading(step=4, operation="snapshot")]
    workers = {0: children[0].worker}
    guard = WorkerSupervisor(workers, lambda rank: False, lambda: readings, said.append)
    guard.request_stop(time.monotonic() - 10.0, StopGrace(most_s=1000.0))
    until(lambda: bool(said))
    assert said[0].startswith("Still writing a snapshot, up to 9")  # of 990 s
    assert guard.killed == frozenset()
    guard.kill()
    assert children[0].process.wait(timeout=patient(60)) == -signal.SIGKILL
    guard.close()


def test_once_one_ended_the_others_have_little_time(
    children: list[Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "PEERS_S", 0.0)
    children += [Child(_WILLING), Child(_STUBBORN)]
    guard = _guard(children)
    children[0].process.terminate()
    assert children[1].process.wait(timeout=patient(60)) == -signal.SIGKILL
    guard.close()


def test_after_success_there_is_time_to_end(
    children: list[Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "PEERS_S", 0.0)
    children += [Child(_WILLING), Child(_WILLING)]
    guard = _guard(children, done=True)
    for child in children:
        child.process.communicate(b"\n")
        assert child.process.returncode == 0
    guard.close()
    assert guard.killed == frozenset()


def test_where_all_have_results_the_time_to_exit_is_limited(
    children: list[Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "EXIT_S", 0.0)
    children.append(Child(_STUBBORN))
    guard = _guard(children, done=True)
    guard.limit_exit()
    assert children[0].process.wait(timeout=patient(60)) == -signal.SIGKILL
    guard.close()


def test_an_order_to_kill_is_obeyed_at_once(children: list[Child]) -> None:
    children += [Child(_STUBBORN), Child(_STUBBORN)]
    guard = _guard(children)
    guard.request_stop(time.monotonic(), StopGrace())
    guard.kill()
    assert [child.process.wait(timeout=patient(60)) for child in children] == [-signal.SIGKILL] * 2
    guard.close()
    assert guard.killed == {0, 1}


def test_a_worker_that_is_gone_is_no_trouble(children: list[Child]) -> None:
    children.append(Child(_WILLING))
    children[0].process.kill()
    children[0].process.wait()
    guard = _guard(children)
    guard.kill()
    guard.close()
    assert guard.killed == frozenset()


def test_reaping_spares_what_was_there_and_finds_orphans(children: list[Child]) -> None:
    children.append(Child(_WILLING))
    spared = descendants()
    adopt_orphans(True)
    try:
        code = "import os, time\nif os.fork() == 0: time.sleep(300)"
        subprocess.run([sys.executable, "-c", code], check=True)
        until(lambda: len(descendants() - spared) == 1)
        (orphan,) = descendants() - spared
        reap(spared)
    finally:
        adopt_orphans(False)
    assert not alive(orphan)
    assert children[0].process.poll() is None


def test_reaping_spares_what_those_have_started_meanwhile(tmp_path: Path) -> None:
    go, code = tmp_path / "go", "import subprocess, sys, time, pathlib\n"
    code += f"while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.01)\n"
    code += "subprocess.run([sys.executable, '-c', 'import time; time.sleep(300)'])"
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        spared = descendants()
        go.touch()
        until(lambda: len(descendants() - spared) == 1)
        (child,) = descendants() - spared
        reap(spared)
        assert alive(child)
        # A fork server's are the workers: these are what reaping is for.
        reap(spared, parent.pid)
        assert not alive(child)
        parent.kill()
