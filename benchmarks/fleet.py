"""Workers that are kept for many trainings: forked once, each on a host of its own or on loopback.

Requests and answers are JSON. Whoever fails ends all of them.
"""

import json
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import final

import torch
import torch._dynamo  # the first optimizer imports it: once here rather than in every worker

from benchmarks.ordered_hosts import address_of, enter, hosts, set_rate
from paceline.launch.process_tree import die_with_parent

Answer = dict[str, object]
Serve = Callable[["Seat", Mapping[str, object]], Answer]
"""Called in the worker, for each request."""

QUEUE_MS = 2
"""For how long a packet waits at most on a link: as in a data centre. A longer queue holds up what
is small behind what is large, as no other part of the network does."""
_FIRST_PORT = 20_000
_ENDING_S = 5.0
_FAILED = "traceback"


@dataclass(frozen=True, kw_only=True)
class Seat:
    """A worker's place."""

    number: int
    host: str
    """Its network namespace; empty on loopback."""

    @property
    def interface(self) -> str:
        """Name the interface by which the workers meet."""
        return "eth0" if self.host else "lo"

    @property
    def address(self) -> str:
        """Of this host."""
        return address_of(self.number) if self.host else "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class _Worker:
    process: BaseProcess
    pipe: Connection
    output: Path
    """What it prints: torch warns of hosts without names."""


@final
class Fleet:
    """Workers that answer requests."""

    def __init__(self, workers: Sequence[_Worker], places: Sequence[str], scratch: Path) -> None:
        self.size = len(workers)
        self.places = tuple(places)
        """Namespaces, empty names on loopback."""
        self.scratch = scratch
        """A directory that is removed at the end."""
        self._workers = workers
        self._meetings = 0

    def meeting(self) -> str:
        """Name a place where a new process group can meet."""
        self._meetings += 1
        if self.places[0]:
            # Nothing else listens in the first worker's namespace.
            return f"tcp://{address_of(0)}:{_FIRST_PORT + self._meetings}"
        return f"file://{self.scratch}/meeting-{self._meetings}"

    def set_rate(self, megabits_per_s: float) -> None:
        """Give all links another rate."""
        set_rate(self.places, megabits_per_s, QUEUE_MS)

    def ask(self, requests: Sequence[Mapping[str, object]], limit_s: float = 300.0) -> list[Answer]:
        """Have the first workers answer a request each, at once.

        Raises:
            RuntimeError: One failed, with its traceback.
            TimeoutError: They took longer than `limit_s`.
        """
        asked = {worker.pipe: i for i, worker in enumerate(self._workers[: len(requests)])}
        for pipe, request in zip(asked, requests, strict=True):
            pipe.send_bytes(json.dumps(request).encode())
        answers: dict[int, Answer] = {}
        until_s = time.monotonic() + limit_s
        while len(answers) < len(requests):
            waited_for = [pipe for pipe, i in asked.items() if i not in answers]
            ready = wait(waited_for, max(0.0, until_s - time.monotonic()))
            if not ready:
                raise TimeoutError(f"workers took longer than {limit_s:g} s over {requests[0]}")
            for pipe in (pipe for pipe in waited_for if pipe in ready):
                answers[asked[pipe]] = _answer(self._workers[asked[pipe]], asked[pipe])
        return [answers[i] for i in range(len(requests))]


@contextmanager
def fleet(size: int, serve: Serve, megabits_per_s: float | None = None) -> Iterator[Fleet]:
    """Lend workers.

    Args:
        size: How many.
        serve: What each of them does with a request.
        megabits_per_s: Of each one's link (needs root); None: all of them are on loopback.
    """
    torch.set_num_threads(1)  # a pool of OpenMP threads doesn't survive a fork
    with (
        tempfile.TemporaryDirectory(prefix="paceline-bench-") as scratch,
        hosts(size, megabits_per_s, QUEUE_MS)
        if megabits_per_s is not None
        else nullcontext([""] * size) as places,
    ):
        workers: list[_Worker] = []
        try:
            for number, host in enumerate(places):
                workers.append(_start(Seat(number=number, host=host), serve, Path(scratch)))
            yield Fleet(workers, places, Path(scratch))
        finally:
            _end(workers)


def _start(seat: Seat, serve: Serve, scratch: Path) -> _Worker:
    context = multiprocessing.get_context("fork")
    near, far = context.Pipe()
    output = scratch / f"worker-{seat.number}.txt"
    worker = _Worker(
        process=context.Process(target=_work, args=(seat, serve, far, os.getpid(), output)),
        pipe=near,
        output=output,
    )
    worker.process.daemon = True
    worker.process.start()
    far.close()
    return worker


def _work(seat: Seat, serve: Serve, pipe: Connection, parent: int, output: Path) -> None:
    die_with_parent(parent)
    with output.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if seat.host:
        enter(seat.host)
    while True:
        try:
            request = json.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)
        try:
            answer = serve(seat, request)
        except BaseException:  # noqa: BLE001 - the parent raises it
            answer = {_FAILED: traceback.format_exc()}
        pipe.send_bytes(json.dumps(answer).encode())


def _answer(worker: _Worker, number: int) -> Answer:
    try:
        answer: Answer = json.loads(worker.pipe.recv_bytes())
    except EOFError:
        raise RuntimeError(f"worker {number} ended:\n{worker.output.read_text()}") from None
    if _FAILED in answer:
        raise RuntimeError(f"worker {number} failed:\n{answer[_FAILED]}")
    return answer


def _end(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.pipe.close()
        worker.process.terminate()
    for worker in workers:
        worker.process.join(_ENDING_S)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
