"""Runs a function over many tasks in processes of their own, results in the order of the tasks."""

import multiprocessing
import os
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

import torch

from paceline.data.items import start_loader_process
from paceline.errors import InfrastructureError

_AHEAD = 2
"""Tasks handed out per process: results that wait for their turn are bounded."""

Task = TypeVar("Task")
Result = TypeVar("Result")


def run_in_order(
    function: Callable[[Task], Result], tasks: Iterable[Task], jobs: int
) -> Iterator[Result]:
    """Apply a function to every task.

    Args:
        function: Of a module; computes on one thread.
        tasks: Read as they are needed.
        jobs: Processes; 1 works in this one.

    Returns:
        The results, in the order of the tasks.

    Raises:
        InfrastructureError: A process died.
    """
    if jobs == 1:
        yield from map(function, tasks)
        return
    executor = ProcessPoolExecutor(
        jobs, multiprocessing.get_context(_start_method()), initializer=_start_process
    )
    waiting: deque[Future[Result]] = deque()
    try:
        for task in tasks:
            waiting.append(_submitted(executor, function, task))
            if len(waiting) >= _AHEAD * jobs:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise InfrastructureError(
            f"a process that {function.__name__.strip('_').replace('_', ' ')}s ended abruptly. The "
            "kernel kills processes when memory runs out: use fewer --jobs"
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)


def count_cores() -> int:
    """Count the cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _submitted(
    executor: ProcessPoolExecutor, function: Callable[[Task], Result], task: Task
) -> Future[Result]:
    with warnings.catch_warnings():  # Python 3.12's about forking with threads: see loader.py
        warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
        return executor.submit(function, task)


def _start_method() -> str | None:
    return "fork" if sys.platform == "linux" else None


def _start_process() -> None:
    start_loader_process(0)
    torch.set_num_threads(1)
