"""What runs in loader processes: a user's data set with seeding, errors and signals handled."""

import multiprocessing
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.multiprocessing
from torch.utils.data import get_worker_info

from paceline.data.protocols import MapDataset
from paceline.data.splitmix import Domain, derive_key
from paceline.errors import DataError, PacelineError
from paceline.launch.process_tree import note_sharing

Collate = Callable[[list[object]], object]
WorkerInit = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class ItemRequest:
    """The samples of one batch, for a loader process."""

    seed: int
    epoch: int
    position: int
    """Of the first one in the epoch's order."""
    indices: tuple[int, ...]


class SeededItems:
    """Wraps a data set so that random choices follow the sample, not the process that reads it.

    Before `dataset[i]` the global generators of torch, NumPy and Python are seeded by (seed, epoch,
    position in the epoch's order); afterwards they are as they were. `collate`, which may mix
    samples at random, is seeded by the position of the first one.
    """

    def __init__(self, dataset: MapDataset, collate: Collate) -> None:
        """Create the data set's wrapper.

        Args:
            dataset: The user's.
            collate: Makes a batch of a list of items.
        """
        self.dataset = dataset
        self._collate = collate

    def __getitems__(self, request: ItemRequest) -> object:
        """Make one batch, collated.

        Raises:
            DataError: The user's code raised; names the sample.
        """
        with _generators_restored():
            items = []
            for position, index in enumerate(request.indices, start=request.position):
                _seed_generators(Domain.ITEM, request.seed, request.epoch, position)
                with _errors_named(f"sample {index}"):
                    items.append(self.dataset[index])
            _seed_generators(Domain.COLLATE, request.seed, request.epoch, request.position)
            try:
                return self._collate(items)
            except Exception as error:
                raise DataError(
                    f"no batch can be made of the samples {shorten(request.indices)}: "
                    f"{type(error).__name__}: {error}"
                ) from error


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
