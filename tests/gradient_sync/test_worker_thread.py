"""Work on a thread: in order, and what fails is raised where it is waited for."""

import threading

import pytest

from paceline.gradient_sync.worker_thread import WorkerThread
from tests.launch.waiting import patient


def test_errands_run_in_order_on_one_other_thread() -> None:
    errands, seen = WorkerThread("test-errands"), []
    given = [
        errands.send(lambda n=n: seen.append((n, threading.current_thread().name)))  # type: ignore[misc]
        for n in range(5)
    ]
    for errand in given:
        errand.result(60)
    assert seen == [(n, "test-errands") for n in range(5)]
    assert errands.end()


def test_a_failure_is_raised_and_the_next_errand_runs() -> None:
    errands = WorkerThread("test-failure")

    def fail() -> None:
        raise RuntimeError("the other end is gone")

    failed, fine = errands.send(fail), errands.send(lambda: None)
    with pytest.raises(RuntimeError, match="the other end is gone"):
        failed.result(60)
    fine.result(60)
    assert errands.end()


def test_the_end_doesnt_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.gradient_sync.worker_thread._END_S", 0.01)
    errands, gate = WorkerThread("test-end"), threading.Event()

    def wait() -> None:
        assert gate.wait(patient(60))

    held = errands.send(wait)
    assert not errands.end()
    gate.set()
    held.result(60)
    errands._thread.join(60)
