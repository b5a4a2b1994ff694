"""Work on a thread: in order, and what fails is raised where it is waited for."""

import threading

import pytest

from paceline.gradient_sync.worker_thread import WorkerThread
from tests.launch.waiting import patient


def test_tasks_run_in_order_on_one_other_thread() -> None:
    tasks, seen = WorkerThread("test-tasks"), []
    given = [
        tasks.send(lambda n=n: seen.append((n, threading.current_thread().name)))  # type: ignore[misc]
        for n in range(5)
    ]
    for task in given:
        task.result(60)
    assert seen == [(n, "test-tasks") for n in range(5)]
    assert tasks.end()


def test_a_failure_is_raised_and_the_next_task_runs() -> None:
    tasks = WorkerThread("test-failure")

    def fail() -> None:
        raise RuntimeError("the other end is gone")

    failed, fine = tasks.send(fail), tasks.send(lambda: None)
    with pytest.raises(RuntimeError, match="the other end is gone"):
        failed.result(60)
    fine.result(60)
    assert tasks.end()


def test_the_end_doesnt_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.gradient_sync.worker_thread._END_S", 0.01)
    tasks, gate = WorkerThread("test-end"), threading.Event()

    def wait() -> None:
        assert gate.wait(patient(60))

    held = tasks.send(wait)
    assert not tasks.end()
    gate.set()
    held.result(60)
    tasks._thread.join(60)
