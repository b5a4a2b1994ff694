"""`paceline.notebook_launcher`: runs a function on several workers, from a notebook or script."""

import json
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

import numpy as np
import torch

from paceline.distributed.device import begun_kind
from paceline.distributed.environment import (
    PINNED_VARIABLE,
    STORE_VARIABLE,
    detect_launchers,
    launcher_request,
    read_environment,
    set_variables,
)
from paceline.distributed.rendezvous import meet_in_file
from paceline.errors import InterruptedTraining, JobError, UsageError
from paceline.launch.process_tree import die_with_parent, spare_children_our_garbage
from paceline.launch.worker_count import usable_cores
from paceline.options.fields import OptionValue
from paceline.script.ending import ended_with_its_block

_LOOPBACK = "127.0.0.1"
_STOPPING = (signal.SIGINT, signal.SIGTERM)
_FAILED_END_S = 5.0
_SAVED_END_S = 120.0
"""For a step, and the snapshot behind it."""


@dataclass(frozen=True)
class _Worker:
    rank: int
    pid: int
    results: Connection


def notebook_launcher(
    function: Callable[..., object], *, workers: int = 2, **arguments: OptionValue
) -> list[object]:
    """Run a function on several workers of this machine and return what each returned.

    The function may be defined in the notebook itself; in it, `paceline.session()` is one of the
    workers. They are forked, so that they see everything that the notebook has defined.

    Args:
        function: Called as `function(**arguments)` in every worker.
        workers: How many; with GPUs at most as many as there are.
        arguments: Its keyword arguments.

    Returns:
        What each worker's call returned, in rank order: None, numbers, text, lists, dictionaries;
        tensors, NumPy's arrays and tuples come as lists, dataclasses as dictionaries.

    Raises:
        UsageError: A GPU has been used in this process, which can't be forked any more; or it is
            one of several workers already.
        JobError: A worker failed; the message has its whole traceback.
        KeyboardInterrupt: The cell was interrupted; no worker is left.
        InterruptedTraining: SIGTERM came, and the program has no handler of its own for it; what
            was trained is saved, and no worker is left.
    """
    workers_here = detect_launchers(read_environment()).workers
    if launcher_request() is not None or any(one.world_size > 1 for one in workers_here[:1]):
        raise UsageError(
            "paceline.notebook_launcher starts workers itself, and this process was started as a "
            "worker (by `paceline run`, torchrun, another notebook_launcher or the like): start "
            "the script by `python`, or call the function without notebook_launcher. Resume a run "
            "that it has trained in its function, by paceline.session(run_dir=..., resume=True)"
        )
    if workers < 1:
        raise UsageError(f"workers must be at least 1, not {workers}")
    if (kind := begun_kind()) is not None:
        raise UsageError(
            f"this process has used {kind.upper()} already, and workers are forked from it: "
            "restart the notebook, and touch the GPU only in the function that notebook_launcher "
            "runs"
        )
    started: list[_Worker] = []
    # They meet in a file: a port would be open to all users. One is named that nobody can take.
    with TemporaryDirectory(prefix="paceline-") as place, socket.socket() as reserved:
        # Bound, not listening: it only keeps the port from others.
        reserved.bind((_LOOPBACK, 0))
        rendezvous = _Rendezvous(str(Path(place) / "store"), str(reserved.getsockname()[1]))
        with _stopped_by_sigterm():
            try:
                for rank in range(workers):
                    with _signals_held() as mask:
                        started.append(_fork(rank, workers, rendezvous, mask, function, arguments))
                return _collect(started)
            except (KeyboardInterrupt, InterruptedTraining):
                stopped, started = started, []
                for text in _end(stopped, _SAVED_END_S):
                    print(text, file=sys.stderr)
                raise
            finally:
                _end(started, _FAILED_END_S)  # what they say by now follows from the first's end


@contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """Let SIGTERM raise, as Ctrl-C does, where it would end this process and its workers at once.

    Raises:
        InterruptedTraining: It came.
    """

    def stop(number: int, frame: object) -> NoReturn:
        raise InterruptedTraining

    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def _signals_held() -> Iterator[set[int]]:
    """Have signals wait until a child has handlers of its own, and the parent knows of it.

    They are held from this thread; where another one takes them, they raise behind the block.

    Yields:
        The signals that were held before.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
    came: list[int] = []
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {n: signal.signal(n, lambda number, _: came.append(number)) for n in _STOPPING}
    try:
        yield {int(number) for number in mask}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for each, handler in handlers.items():
            signal.signal(each, signal.SIG_DFL if handler is None else handler)
        for number in came:
            signal.raise_signal(number)


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
    mask: set[int],
    function: Callable[..., object],
    arguments: Mapping[str, OptionValue],
) -> _Worker:
    # Else what is buffered here would be printed by the child as well.
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = Pipe(duplex=False)
    parent = os.getpid()
    drawn = random.getstate()
    spare_children_our_garbage()
    pid = os.fork()
    if pid == 0:
        reading.close()
        # Python seeds it anew in each fork; NumPy's and torch's go on from the notebook's in all.
        random.setstate(drawn)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the notebook passes it on as SIGTERM
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # until the session takes it
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
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
    # Become a worker: no orphan, its own environment and threads.
    die_with_parent(parent)
    threads = max(1, usable_cores() // workers)
    set_variables(_environment(rank, workers, rendezvous, threads))
    meet_in_file(rendezvous.file)
    torch.set_num_threads(1)  # a pool of OpenMP threads doesn't survive a fork
    # Call the function; its value or its traceback goes through the pipe.
    code = 0
    try:
        with ended_with_its_block():
            value = function(**arguments)
        answer = json.dumps(["value", _plain(value)])
        _flush()  # the notebook ends its workers as soon as it has heard from all
        writing.send_bytes(answer.encode())
    except InterruptedTraining as error:
        code = int(str(error.code))
    except BaseException:  # noqa: BLE001  # the process ends here; the notebook raises it
        writing.send_bytes(json.dumps(["traceback", traceback.format_exc()]).encode())
        code = 1
    _flush()
    os._exit(code)


def _flush() -> None:
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()


def _plain(value: object) -> object:
    """Give a value as JSON can have it; a dictionary as its items, since keys may be numbers.

    Raises:
        TypeError: It, or a part of it, is of another kind.
    """
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        value = value.tolist()
    if is_dataclass(value) and not isinstance(value, type):
        value = {each.name: getattr(value, each.name) for each in fields(value)}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {"items": [[_plain_key(name), _plain(each)] for name, each in value.items()]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"the function gave a {type(value).__name__} back; what comes from a worker is None, "
        "numbers, text, tensors and arrays (as lists), lists, dictionaries or dataclasses (as "
        "dictionaries) of these. A model is in the run's snapshots: paceline export"
    )


def _plain_key(key: object) -> object:
    if isinstance(key, dict) or is_dataclass(key):
        raise TypeError(
            f"the function gave a dictionary back that has a {type(key).__name__} as a key; what "
            "comes from a worker has numbers, text or tuples of these"
        )
    return _plain(key)


def _dictionary(found: dict[str, list[list[object]]]) -> dict[object, object]:
    """Undo what `_plain` does to a dictionary."""
    return {_key(name): each for name, each in found["items"]}


def _key(plain: object) -> object:
    return tuple(map(_key, plain)) if isinstance(plain, list) else plain


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
                kind, answer = json.loads(ready.recv_bytes(), object_hook=_dictionary)
            except EOFError:
                raise JobError(f"worker {worker.rank} ended without a word") from None
            if kind == "traceback":
                raise JobError(f"worker {worker.rank} failed:\n{answer}")
            values[worker.rank] = answer
    return [values[rank] for rank in sorted(values)]


def _end(started: list[_Worker], within_s: float) -> list[str]:
    """Ask the workers that are left to stop, kill them when they don't, and wait for all.

    Args:
        started: All workers.
        within_s: How long they may take; a second Ctrl-C or SIGTERM has them killed at once.

    Returns:
        The errors of those that failed as they ended.
    """
    until_s, failed = time.monotonic() + within_s, []
    try:
        # All are asked before any is waited for.
        for worker in started:
            with suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGTERM)
        for worker in started:
            for kind, answer in _last_words(worker.results, until_s):
                if kind == "traceback":
                    failed.append(f"worker {worker.rank} failed:\n{answer}")
    finally:
        # Of those that have ended nothing is left to kill but what waitpid takes away.
        for worker in started:
            os.kill(worker.pid, signal.SIGKILL)
            worker.results.close()
            os.waitpid(worker.pid, 0)
    return failed


def _last_words(results: Connection, until_s: float) -> Iterator[tuple[str, object]]:
    """Give what comes until a worker's pipe ends, which tells that the process has ended."""
    with suppress(EOFError, OSError):
        while results.poll(max(0.0, until_s - time.monotonic())):
            yield json.loads(results.recv_bytes())
