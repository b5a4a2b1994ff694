"""What runs in loader processes: a user's data set with seeding, errors and signals handled."""

import multiprocessing
import os
import random
import signal
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.sharedctypes import RawValue
from typing import Any, TypeVar

import numpy as np
import torch
import torch.multiprocessing
from torch.utils.data import get_worker_info

from paceline.data.fingerprint import find_held
from paceline.data.protocols import MapDataset
from paceline.data.splitmix import Domain, derive_key
from paceline.errors import DataError, InfrastructureError, PacelineError
from paceline.launch.process_tree import note_sharing

Collate = Callable[[list[object]], object]
WorkerInit = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class ItemRequest:
    """The samples of one batch, for a loader process."""

    seed: int
    epoch: int
    indices: tuple[int, ...]
    places: tuple[int, ...] = ()
    """Where they stand in the epoch's order, if one sample may come several times."""

    @property
    def seeds(self) -> tuple[int, ...]:
        """What each sample's random numbers follow from, besides seed and epoch."""
        return self.places or self.indices


_OWN_KINDS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_TRIES = 3
"""Batches, at most, of which a sample is read again."""


class OwnDraws:
    """Looks whether a data set draws by random generators that it holds itself.

    Nothing seeds these, and how far each has got follows from what its process has read before.
    """

    def __init__(self, dataset: object) -> None:
        """Create the data set's wrapper.

        Args:
            dataset: The user's.
        """
        found = find_held([dataset], _OWN_KINDS)
        self._generators = [one for one in found if not _is_seeded(one)]
        self._tries = _TRIES if self._generators else 0
        self._seen = RawValue("b", 0) if self._generators else None  # set in loader processes

    @property
    def seen(self) -> bool:
        """Whether it does: here, or in a loader process."""
        return self._seen is not None and bool(self._seen.value)

    def states(self) -> list[object]:
        """Tell how far they have got; empty where it needn't be looked at any more."""
        return list(map(_state_of, self._generators)) if self._tries and not self.seen else []

    def look(self, before: list[object], read_again: Callable[[], object]) -> None:
        """Look at what the reading of a batch has done.

        Args:
            before: `states` before it.
            read_again: Reads a sample of it once more.
        """
        if self._seen is None or self.states() == before:
            return
        # One that is seeded by the sample, or draws once for all, stands where it stood then.
        reached, states = list(map(_raw_state, self._generators)), [self.states()]
        for _ in range(2):
            read_again()
            states.append(self.states())
        for generator, state in zip(self._generators, reached, strict=True):
            _set_state(generator, state)
        self._tries -= 1
        if states[0] != states[1] != states[2]:
            self._seen.value = 1


def _is_seeded(generator: object) -> bool:
    """Tell whether it is one of the global ones, or has no state."""
    ours = (random._inst, np.random.mtrand._rand, torch.default_generator)
    return any(generator is one for one in ours) or isinstance(generator, random.SystemRandom)


def _raw_state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return generator._bit_generator.state


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, torch.Generator):
        generator.set_state(state)
    else:
        generator._bit_generator.state = state


def _state_of(generator: Any) -> object:
    """Tell states apart."""
    state = _raw_state(generator)
    if isinstance(generator, torch.Generator):
        return state.numpy().tobytes()
    return hash(state) if isinstance(generator, random.Random) else str(state)


class SeededItems:
    """Wraps a data set so that a sample's random choices depend on (seed, epoch, index) alone.

    Before each item the global generators of torch, NumPy and Python are seeded, and what they were
    is brought back afterwards: neither the number of loader processes nor the order of reading
    matters. A data set with `__getitems__` makes its items together, seeded by the first index, and
    so does `collate` (which may mix samples at random).
    """

    def __init__(self, dataset: MapDataset, collate: Collate) -> None:
        """Create the data set's wrapper.

        Args:
            dataset: The user's.
            collate: Makes a batch of a list of items.
        """
        self.dataset = dataset
        self.own_draws = OwnDraws(dataset)
        self._collate = collate

    def __getitems__(self, request: ItemRequest) -> object:
        """Make one batch, collated.

        Raises:
            DataError: The user's code raised; names the sample.
        """
        with _generators_restored():
            before = self.own_draws.states()
            items = self._read(request)
            if before:
                first = replace(request, indices=request.indices[:1], places=request.places[:1])
                self.own_draws.look(before, lambda: self._read(first))
            try:
                with collating(request):
                    return self._collate(items)
            except Exception as error:
                raise DataError(
                    f"no batch can be made of the samples {shorten(request.indices)}: "
                    f"{type(error).__name__}: {error}"
                ) from error

    def _read(self, request: ItemRequest) -> list[object]:
        together: Callable[[list[int]], Sequence[object]] | None
        together = getattr(self.dataset, "__getitems__", None)
        if together is not None:
            _seed_generators(Domain.ITEM, request.seed, request.epoch, request.seeds[0])
            with _errors_named(f"the samples {shorten(request.indices)}"):
                return list(together(list(request.indices)))
        items = []
        for index, place in zip(request.indices, request.seeds, strict=True):
            _seed_generators(Domain.ITEM, request.seed, request.epoch, place)
            with _errors_named(f"sample {index}"):
                items.append(self.dataset[index])
        return items


@contextmanager
def collating(request: ItemRequest) -> Iterator[None]:
    """Seed what a batch is made of items with, by its first sample; bring back what was before."""
    with seeded(Domain.COLLATE, request.seed, request.epoch, request.seeds[0]):
        yield


@contextmanager
def seeded(domain: Domain, *parts: int) -> Iterator[None]:
    """Seed the global generators by integers; bring back what was before."""
    with _generators_restored():
        _seed_generators(domain, *parts)
        yield


def start_method() -> str | None:
    """Choose how loader processes start, whatever way this process itself was started.

    A fork begins at once and needs no pickling of the data set; it is PyTorch's own default on
    Linux up to Python 3.13. The children touch no GPU.
    """
    return "fork" if sys.platform == "linux" else None


def start_loader_process(worker_id: int, then: WorkerInit | None = None) -> None:
    """Set a fresh loader process up; called by the DataLoader inside it.

    What asks torch's `get_worker_info()` for the data set is given the user's, as it would be by
    a DataLoader of its own.

    Signals meant for the training (Ctrl-C reaches the whole process group) don't end it, it ends
    with its parent, and it hands tensors over by file name: with file descriptors, torch's default,
    a stopped loader process blocks its parent for ever, outside any timeout.

    Args:
        worker_id: Given by the DataLoader; for `then`.
    """
    # The wake-up descriptor was inherited: a signal here would be taken for one to the parent.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.multiprocessing.set_sharing_strategy("file_system")
    note_sharing()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    info = get_worker_info()
    if info is not None and isinstance(info.dataset, SeededItems):
        object.__setattr__(info, "dataset", info.dataset.dataset)  # torch lets nobody set it
    if then is not None:
        then(worker_id)


def shorten(indices: Sequence[int], most: int = 8) -> str:
    """Write sample indices for a message, at most a few of them."""
    listed = ", ".join(str(index) for index in indices[:most])
    return listed if len(indices) <= most else f"{listed} … ({len(indices)} in all)"


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _seed_generators(domain: Domain, *parts: int) -> None:
    # One key for all generators, cut to what each takes: any, 32 bits, 63 bits.
    key = derive_key(domain, *parts)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key >> 1)


@contextmanager
def _generators_restored() -> Iterator[None]:
    python, legacy = random.getstate(), np.random.get_state()
    torch_state = torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)
        torch.default_generator.set_state(torch_state)


@contextmanager
def _errors_named(what: str) -> Iterator[None]:
    """Add the sample to whatever the user's code raises."""
    try:
        yield
    except PacelineError:
        raise
    except Exception as error:
        message = f"the data set failed at {what}: {type(error).__name__}: {error}"
        raise DataError(message) from error


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
        jobs, multiprocessing.get_context(start_method()), initializer=_start_process
    )
    waiting: deque[Future[Result]] = deque()
    try:
        # Only so many tasks are ahead: their results wait in memory until their turn.
        for task in tasks:
            waiting.append(_submitted(executor, function, task))
            if len(waiting) >= _AHEAD * jobs:
                yield waiting.popleft().result()
        # No tasks are left; the results that are still to come follow in order.
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise InfrastructureError(
            f"a process that {function.__name__.strip('_').replace('_', ' ')}s ended abruptly. The "
            "kernel kills processes when memory runs out: use fewer --jobs"
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)


def _submitted(
    executor: ProcessPoolExecutor, function: Callable[[Task], Result], task: Task
) -> Future[Result]:
    with warnings.catch_warnings():  # Python 3.12's about forking with threads: see loader.py
        warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
        return executor.submit(function, task)


def _start_process() -> None:
    start_loader_process(0)
    torch.set_num_threads(1)
