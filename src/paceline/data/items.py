"""What happens to a user's data set inside a loader process: seeding, errors, signals."""

import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.multiprocessing

from paceline.data.splitmix import Domain, derive_key
from paceline.errors import DataError, PacelineError
from paceline.launch.processes import note_sharing


class MapDataset(Protocol):
    """A map-style data set; its items are (input, target) pairs."""

    def __getitem__(self, index: int, /) -> object:
        """Read and transform one sample."""

    def __len__(self) -> int:
        """Count the samples."""


Collate = Callable[[list[object]], object]


@dataclass(frozen=True, slots=True)
class ItemRequest:
    """The samples of one batch, for a loader process."""

    seed: int
    epoch: int
    indices: tuple[int, ...]


class SeededItems:
    """Wraps a data set so that a sample's random choices depend on (seed, epoch, index) alone.

    Before each item the global generators of torch, NumPy and Python are seeded, and what they were
    is brought back afterwards: neither the number of loader processes nor the order of reading
    matters. A data set with `__getitems__` makes its items together, seeded by the first index, and
    so does `collate` (which may mix samples at random).
    """

    def __init__(self, dataset: MapDataset, collate: Collate) -> None:
        """Args:
        dataset: The user's.
        collate: Makes a batch of a list of items.
        """
        self._dataset = dataset
        self._collate = collate

    def __getitems__(self, request: ItemRequest) -> object:
        """Make one batch, collated.

        Raises:
            DataError: The user's code raised; names the sample.
        """
        with _generators_restored():
            items = self._read(request)
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
        together = getattr(self._dataset, "__getitems__", None)
        if together is not None:
            _seed_generators(Domain.ITEM, request, request.indices[0])
            with _errors_named(f"the samples {shorten(request.indices)}"):
                return list(together(list(request.indices)))
        items = []
        for index in request.indices:
            _seed_generators(Domain.ITEM, request, index)
            with _errors_named(f"sample {index}"):
                items.append(self._dataset[index])
        return items


@contextmanager
def collating(request: ItemRequest) -> Iterator[None]:
    """Seed what a batch is made of items with, by its first sample; bring back what was before."""
    with _generators_restored():
        _seed_generators(Domain.COLLATE, request, request.indices[0])
        yield


def start_loader_process(worker_id: int) -> None:
    """Set a fresh loader process up; called by the DataLoader inside it.

    Signals meant for the training (Ctrl-C reaches the whole process group) don't end it, it ends
    with its parent, and it hands tensors over by file name: with file descriptors, torch's default,
    a stopped loader process blocks its parent for ever, outside any timeout.

    Args:
        worker_id: Given by the DataLoader; not used.
    """
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.multiprocessing.set_sharing_strategy("file_system")
    note_sharing()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def shorten(indices: Sequence[int], most: int = 8) -> str:
    """Write sample indices for a message, at most a few of them."""
    listed = ", ".join(str(index) for index in indices[:most])
    return listed if len(indices) <= most else f"{listed} … ({len(indices)} in all)"


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _seed_generators(domain: Domain, request: ItemRequest, index: int) -> None:
    key = derive_key(domain, request.seed, request.epoch, index)
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
