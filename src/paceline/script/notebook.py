"""`paceline.launch`: a function on several workers, from a notebook's cell or from a script."""

import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

import torch

from paceline.distributed.device import begun_kind
from paceline.distributed.environment import (
    PINNED_VARIABLE,
    STORE_VARIABLE,
    launcher_request,
    set_variables,
)
from paceline.distributed.rendezvous import meet_in_file
from paceline.errors import InterruptedTraining, JobError, UsageError
from paceline.launch.process_tree import die_with_parent, spare_children_our_garbage
from paceline.launch.worker_count import usable_cores
from paceline.options.fields import OptionValue
from paceline.script.ending import ended_with_its_block

_LOOPBACK = "127.0.0.1"
_END_S = 5.0


@dataclass(frozen=True)
class _Worker:
    rank: int
    pid: int
    results: Connection


def launch(
    function: Callable[..., object], *, workers: int = 2, **arguments: OptionValue
) -> list[object]:
    """Run a function on several workers of this machine and give what each returned.

    The function may be defined in the notebook itself; in it, `paceline.session()` is one of the
    workers. They are forked, so that they see everything that the notebook has defined.

    Args:
        function: Called as `function(**arguments)` in every worker.
        workers: How many; with GPUs at most as many as there are.
        arguments: Its keyword arguments.

    Returns:
        What each worker's call returned, in rank order: None, numbers, text, lists, dictionaries;
        tensors come as lists.

    Raises:
        UsageError: A GPU has been used in this process, which can't be forked any more; or it is a
            worker of `paceline run`.
        JobError: A worker failed; the message has its whole traceback.
        KeyboardInterrupt: The cell was interrupted; no worker is left.
    """
    if launcher_request() is not None:
        raise UsageError(
            "paceline.launch starts workers itself, and here `paceline run` has started some: "
            "start the script by `python`, or call the function without paceline.launch"
        )
    if workers < 1:
        raise UsageError(f"workers must be at least 1, not {workers}")
    if (kind := begun_kind()) is not None:
        raise UsageError(
            f"this process has used {kind.upper()} already, and workers are forked from it: "
            "restart the notebook, and touch the GPU only in the function that paceline.launch runs"
        )
    started: list[_Worker] = []
    # They meet in a file: a port would be open to all users. One is named that nobody can take.
    with TemporaryDirectory(prefix="paceline-") as place, socket.socket() as reserved:
        # Bound, not listening: it only keeps the port from others.
        reserved.bind((_LOOPBACK, 0))
        rendezvous = _Rendezvous(str(Path(place) / "store"), str(reserved.getsockname()[1]))
        try:
            for rank in range(workers):
                started.append(_fork(rank, workers, rendezvous, function, arguments))
            return _collect(started)
        finally:
            _end(started)


@dataclass(frozen=True)
class _Rendezvous:
    """Where the workers meet."""

    file: str
    port: str
    """What MASTER_PORT says."""


def _fork(
    rank: int,
    workers: int,
    rendezvous: _Rendezvous,
    function: Callable[..., object],
    arguments: Mapping[str, OptionValue],
) -> _Worker:
    # Else what is buffered here would be printed by the child as well.
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = Pipe(duplex=False)
    parent = os.getpid()
    spare_children_our_garbage()
    pid = os.fork()
    if pid == 0:
        reading.close()
        _run_worker(rank, workers, rendezvous, parent, function, arguments, writing)
    writing.close()
    return _Worker(rank, pid, reading)


def _run_worker(
    rank: int,
    workers: int,
    rendezvous: _Rendezvous,
    parent: int,
    function: Callable[..., object],
    arguments: Mapping[str, OptionValue],
    writing: Connection,
) -> NoReturn:
    """Call the function and leave at once: the notebook's own clean-up is not this process's."""
    # Become a worker: no orphan, its own signals, environment and threads.
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the notebook passes it on as SIGTERM
    threads = max(1, usable_cores() // workers)
    set_variables(_environment(rank, workers, rendezvous, threads))
    meet_in_file(rendezvous.file)
    torch.set_num_threads(1)  # a pool of OpenMP threads doesn't survive a fork
    # Call the function; its value or its traceback goes through the pipe.
    code = 0
    try:
        with ended_with_its_block():
            value = function(**arguments)
        answer = json.dumps({"value": value}, default=_as_list)
        _flush()  # the notebook ends its workers as soon as it has heard from all
        writing.send_bytes(answer.encode())
    except InterruptedTraining as error:
        code = int(str(error.code))
    except BaseException:  # noqa: BLE001  # the process ends here; the notebook raises it
        writing.send_bytes(json.dumps({"traceback": traceback.format_exc()}).encode())
        code = 1
    _flush()
    os._exit(code)


def _flush() -> None:
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()


def _as_list(value: object) -> object:
    """Give tensors back as lists.

    Raises:
        TypeError: It is something else.
    """
    if isinstance(value, torch.Tensor):
        return value.tolist()
    raise TypeError(
        f"the function gave a {type(value).__name__} back; what comes from a worker is None, "
        "numbers, text, tensors (as lists), lists or dictionaries of these"
    )


def _environment(rank: int, workers: int, rendezvous: _Rendezvous, threads: int) -> dict[str, str]:
    interface = "lo0" if sys.platform == "darwin" else "lo"
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": workers,
        "LOCAL_WORLD_SIZE": workers,
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1,
        "OMP_NUM_THREADS": threads,
        PINNED_VARIABLE: 1,  # what the function computes before its session
    }
    return {name: str(number) for name, number in numbers.items()} | {
        "MASTER_ADDR": _LOOPBACK,
        "MASTER_PORT": rendezvous.port,
        STORE_VARIABLE: f"{rendezvous.port}:{rendezvous.file}",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
    }


def _collect(started: list[_Worker]) -> list[object]:
    values: dict[int, object] = {}
    waiting = {worker.results: worker for worker in started}
    while waiting:
        # In the order of their ends: the first failure is raised at once.
        for ready in wait(list(waiting)):
            assert isinstance(ready, Connection)
            worker = waiting.pop(ready)
            try:
                answer = json.loads(ready.recv_bytes())
            except EOFError:
                raise JobError(f"worker {worker.rank} ended without a word") from None
            if "traceback" in answer:
                raise JobError(f"worker {worker.rank} failed:\n{answer['traceback']}")
            values[worker.rank] = answer["value"]
    return [values[rank] for rank in sorted(values)]


def _end(started: list[_Worker]) -> None:
    """Ask the workers that are left to stop, kill them when they don't, and wait for all."""
    # All are asked before any is waited for.
    for worker in started:
        with suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGTERM)
    for worker in started:
        # The pipe's end tells that the process has ended.
        while worker.results.poll(_END_S):
            try:
                worker.results.recv_bytes()
            except (EOFError, OSError):
                break
        else:
            os.kill(worker.pid, signal.SIGKILL)
        worker.results.close()
        os.waitpid(worker.pid, 0)
