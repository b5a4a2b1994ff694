import os

import pytest

from paceline.errors import UsageError
from paceline.launch.placement import choose_workers, threads_per_worker, usable_cores


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
