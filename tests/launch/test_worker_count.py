import os
import resource
import subprocess
import sys

import pytest

from paceline.errors import UsageError
from paceline.launch.worker_count import (
    MAX_WORKERS,
    check_machine,
    choose_workers,
    threads_per_worker,
    usable_cores,
)


@pytest.mark.parametrize(
    ("asked", "gpus", "cores", "backend", "workers"),
    [
        (None, 0, 1, "auto", 1),
        (None, 0, 2, "auto", 2),
        (None, 0, 64, "auto", 2),
        (5, 0, 64, "auto", 5),
        (None, 8, 64, "auto", 8),
        (4, 8, 64, "auto", 4),
        (4, 4, 2, "nccl", 4),
        (None, 8, 64, "gloo", 2),
        (3, 1, 4, "gloo", 3),
        (4, 0, 2, "auto", 4),
    ],
)
def test_workers(asked: int | None, gpus: int, cores: int, backend: str, workers: int) -> None:
    assert choose_workers(asked, gpus, cores, backend) == workers


@pytest.mark.parametrize(
    ("asked", "gpus", "cores", "backend", "message"),
    [
        (0, 0, 2, "auto", "at least 1"),
        (
            125,
            0,
            2,
            "auto",
            "--workers 125 is more .* at most 124, .* CPU cores gain no speed.*--hosts",
        ),
        (None, 0, 8, "nccl", "there is none here.*--backend gloo"),
        (2, 1, 8, "nccl", "there is 1 GPU here.*--workers 1"),
        (9, 8, 64, "auto", "there are 8 GPUs here.*--workers 8"),
    ],
)
def test_what_is_not_there_cannot_be_asked_for(
    asked: int | None, gpus: int, cores: int, backend: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        choose_workers(asked, gpus, cores, backend)


@pytest.mark.parametrize(
    ("asked", "workers", "cores", "omp", "threads"),
    [
        (None, 2, 8, None, 4),
        (None, 3, 8, None, 2),
        (None, 4, 2, None, 1),
        (3, 2, 8, "7", 3),
        (None, 2, 8, "3", 3),
        (None, 2, 8, "3,2", 3),
        (None, 2, 8, "", 4),
    ],
)
def test_threads(
    asked: int | None, workers: int, cores: int, omp: str | None, threads: int
) -> None:
    assert threads_per_worker(asked, workers, cores, omp) == threads


@pytest.mark.parametrize(("asked", "omp"), [(0, None), (9, None), (None, "many"), (None, "0")])
def test_impossible_threads_are_refused(asked: int | None, omp: str | None) -> None:
    with pytest.raises(UsageError, match=r"threads|OMP_NUM_THREADS"):
        threads_per_worker(asked, 2, 8, omp)


def test_cores_are_those_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `taskset` says; the machine's own number where a system knows no affinity."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1, 5, 7} if not process else {})
    assert usable_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    assert usable_cores() == 64
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores() == 1


def test_the_most_workers_are_as_many_as_the_fork_server_can_be_asked_for() -> None:
    """As torch's elastic agent does it: every worker is handed the result queues of all."""
    code = """
import multiprocessing, sys
context = multiprocessing.get_context("forkserver")
queues = {rank: context.SimpleQueue() for rank in range(int(sys.argv[1]))}
process = context.Process(target=len, args=(queues,))
try:
    process.start()
except (ValueError, OSError) as error:
    sys.exit(3)
process.join()
"""
    for workers, code_expected in ((MAX_WORKERS, 0), (MAX_WORKERS + 1, 3)):
        done = subprocess.run(
            [sys.executable, "-c", code, str(workers)],
            capture_output=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == code_expected, done.stderr


@pytest.mark.parametrize(
    ("soft", "hard", "workers", "left"),
    [
        (256, 4096, 100, 1400),  # as much as is needed
        (1024, 4096, 8, 1024),  # enough already
        (1024, resource.RLIM_INFINITY, 100, 1400),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 100, resource.RLIM_INFINITY),
    ],
)
def test_the_limit_of_open_files_is_raised_where_it_is_too_low(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, workers: int, left: int
) -> None:
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, to: limits.append(to))
    check_machine(workers)
    assert limits[-1] == (left, hard)


def test_a_limit_of_open_files_that_cannot_be_raised_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 800))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    check_machine(50)
    with pytest.raises(UsageError, match=r"needs about 1400 open files .* limit is 800.* most 50 "):
        check_machine(100)
