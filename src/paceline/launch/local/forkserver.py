"""The process that workers are forked from: it has torch imported before the first one starts.

A worker forked from it starts in a tenth of a second; started early, it imports torch while the
launcher does the same on another core.
"""

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import forkserver, resource_tracker

from paceline.launch.local.forkserver_child import LAUNCHER_VARIABLE
from paceline.launch.scratch import own_directory
from paceline.launch.signals import STOP_SIGNALS

_PRELOAD = (
    "paceline.launch.local.forkserver_child",  # first: see there
    "torch",
    "torch.distributed",
    "torch.distributed.elastic.multiprocessing.api",
    "paceline.launch.local.worker",
)

AT_IMPORT = ("TORCH_CUDA_SANITIZER",)
"""Variables at which torch begins to use CUDA while it is imported, which no fork survives: workers
get them when they have been forked."""

HASH_SEED = "PYTHONHASHSEED"
_TUNABLES = "GLIBC_TUNABLES"
"""What glibc reads when a program starts; other C libraries leave it alone."""
_HUGE_PAGES = "glibc.malloc.hugetlb"


@dataclass(frozen=True)
class _Setting:
    pid: int
    """Process that started it: a forked child must not take it for its own."""
    preload: tuple[str, ...]
    threads: int
    hash_seed: str


_running: list[_Setting] = []  # the interpreter has one fork server, so this is as global as it


def prepare(preload: Sequence[str], threads: int) -> None:
    """Start the fork server, and return at once while it imports; call it before importing torch.

    Called again with the same threads and hash seed and nothing new to import, it does nothing;
    otherwise the server is replaced. Call it in the main thread: the server dies with the thread
    that started it.

    Args:
        preload: Modules to import beside torch, such as the entry's. One that can't be imported is
            left to the worker to report; it must not raise anything but ImportError.
        threads: CPU threads of each worker; thread pools read this while they are imported.
    """
    wanted = _Setting(os.getpid(), tuple(preload), threads, _hash_seed())
    if not (_running and _serves(_running[0], wanted)):
        release()
        forkserver.set_forkserver_preload([*_PRELOAD, *preload])
        _running[:] = [wanted]
    own_directory()  # where the server's socket goes
    with _environment(threads):
        # Two blocks: starting the tracker, as the server's start would, unblocks the signals.
        with _holding_signals():
            resource_tracker.ensure_running()  # it lets signals through when it is started
        with _holding_signals():
            forkserver.ensure_running()


def release() -> None:
    """End the fork server, also in the middle of its imports; it must have no live workers.

    Without a call the server ends with this process.
    """
    if _running and _running[0].pid == os.getpid() and (server := server_pid()) is not None:
        with suppress(ProcessLookupError):
            os.kill(server, signal.SIGKILL)
        # Closes the pipe and waits for the process, so that `ensure_running` starts another one.
        forkserver._forkserver._stop()  # type: ignore[attr-defined]  # has no public name
    _running.clear()


def server_pid() -> int | None:
    """Give the fork server's process id, or None where none runs."""
    pid: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return pid


def _serves(running: _Setting, wanted: _Setting) -> bool:
    same = replace(running, preload=()) == replace(wanted, preload=())
    return same and set(wanted.preload) <= set(running.preload)


def _hash_seed() -> str:
    return os.environ.get(HASH_SEED) or "0"


def with_huge_pages(tunables: str) -> str:
    """Add that malloc is to ask for huge pages, where the kernel gives them to who asks.

    Otherwise the processor looks up the activations of a step in pages of 4 KB: up to 6 % of a
    CPU's step (112.0 instead of 115.9 ms for a ResNet-18 with 16 images of 64x64).

    Args:
        tunables: Glibc's; where they mention huge pages they stay as they are.
    """
    if _HUGE_PAGES in tunables:
        return tunables
    return ":".join(filter(None, [tunables, f"{_HUGE_PAGES}=1"]))


@contextmanager
def hash_seed_is(seed: str) -> Iterator[None]:
    """Have workers that are started in this block hash text by a seed, unless the user set one.

    Args:
        seed: A whole number; outside of such a block it is 0.
    """
    with _variables({HASH_SEED: os.environ.get(HASH_SEED) or seed}):
        yield


@contextmanager
def _environment(threads: int) -> Iterator[None]:
    ours: dict[str, str | None] = dict.fromkeys(AT_IMPORT)
    ours |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    ours[LAUNCHER_VARIABLE] = str(os.getpid())
    ours[_TUNABLES] = with_huge_pages(os.environ.get(_TUNABLES, ""))
    # Python reads it at its start alone: sets of text have one order in all workers and starts.
    ours[HASH_SEED] = _hash_seed()
    with _variables(ours):
        yield


@contextmanager
def _variables(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables of the environment in the block; None takes one out of it."""
    before = {name: os.environ.get(name) for name in values}
    _put(values)
    try:
        yield
    finally:
        _put(before)


def _put(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def _holding_signals() -> Iterator[None]:
    """Hold the signals to stop back: none may be lost here, nor reach a server that has just begun.

    Such a signal often goes to the whole process group; what becomes of it the launcher decides. A
    process that is started in the block has them blocked, until it ignores them by itself.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
