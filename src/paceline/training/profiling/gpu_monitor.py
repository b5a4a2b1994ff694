"""Monitors a worker's GPU while it trains: memory used, and utilization."""

import math
import threading
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import final

import torch

from paceline.distributed.device import features, pci_address
from paceline.distributed.group import Group
from paceline.distributed.system_gpus import read_utilization

_EVERY_S = 1.0
"""NVIDIA's driver itself samples over a sixth of a second to a second."""
_END_S = 5.0
MEMORY, UTILIZATION = "gpu_memory_bytes", "gpu_utilization"
"""Columns of `metrics.csv`."""


def peak_memory(device: torch.device) -> int | None:
    """Give the peak bytes that tensors took on a GPU; None if the backend doesn't count them."""
    if not features(device).counts_memory:
        return None
    return int(torch.accelerator.max_memory_allocated(device))


@final
class GpuMonitor:
    """Samples a GPU once a second, on a background thread that never waits for the device."""

    def __init__(self, peak: Callable[[], int | None], read: Callable[[], float | None]) -> None:
        """Begin to sample.

        Args:
            peak: Gives the most memory that tensors have taken so far, in bytes.
            read: Gives the share of the last second in which the GPU computed; None where it can't
                be read.
        """
        self.memory_bytes: int | None = None
        """The newest sample of the most that tensors have taken."""
        self.utilization: float | None = None
        """The newest sample; None where nobody tells it."""
        self._peak, self._read = peak, read
        self._sampled: list[float] = []
        """Of the epoch so far."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-gpu", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, device: torch.device) -> "GpuMonitor":
        """Watch a worker's own GPU."""
        address = pci_address(device)
        read = None if address is None else read_utilization(address)
        return cls(lambda: peak_memory(device), read or (lambda: None))

    def close(self) -> None:
        """End the thread; doesn't wait for long if the driver hangs."""
        self._ended.set()
        self._thread.join(_END_S)

    def close_epoch(self, group: Group) -> Mapping[str, float]:
        """Give the epoch's figures over all workers, and begin another. Collective.

        Returns:
            The most memory that tensors of a worker have taken so far, and the mean share of time
            in which the GPUs computed; without those that no worker knows.
        """
        sampled, self._sampled = self._sampled, []
        peak = self._peak()
        own = torch.tensor(
            [
                math.nan if peak is None else float(peak),
                fmean(sampled) if sampled else math.nan,
            ],
            dtype=torch.float64,
        )
        memory, used = (
            [value for value in column if not math.isnan(value)]
            for column in group.gather_rows(own).T.tolist()
        )
        found = {MEMORY: max(memory)} if memory else {}
        return found | {UTILIZATION: fmean(used)} if used else found

    def _run(self) -> None:
        while not self._ended.wait(_EVERY_S):
            self.memory_bytes, self.utilization = self._peak(), self._read()
            if self.utilization is not None:
                self._sampled.append(self.utilization)
