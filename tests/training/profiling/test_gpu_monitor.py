import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from paceline.distributed.group import Group
from paceline.training.profiling import gpu_monitor
from paceline.training.profiling.gpu_monitor import GpuMonitor


def group_with(*others: tuple[float, float]) -> Group:
    """This worker and others, with what they contribute."""
    rows = torch.tensor(others, dtype=torch.float64).reshape(-1, 2)

    def gather_rows(own: Tensor) -> Tensor:
        return torch.cat([own[None], rows])

    return cast(Group, SimpleNamespace(gather_rows=gather_rows))


class Gpu:
    """Says one thing after another, and when all has been heard."""

    def __init__(self, *shares: float | None) -> None:
        self._shares: Iterator[float | None] = iter(shares)
        self.is_through = threading.Event()

    def read(self) -> float | None:
        try:
            return next(self._shares)
        except StopIteration:
            self.is_through.set()
            return None


def monitor_of(gpu: Gpu, peak: int | None) -> GpuMonitor:
    monitor = GpuMonitor(lambda: peak, gpu.read)
    assert gpu.is_through.wait(10)
    return monitor


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_monitor, "_EVERY_S", 0.001)


def test_an_epochs_figures_over_all_workers() -> None:
    monitor = monitor_of(Gpu(0.5, None, 0.7), peak=3 << 30)
    try:
        found = monitor.close_epoch(group_with((5 << 30, 0.8), (1 << 30, float("nan"))))
        assert found == {"gpu_memory_bytes": 5 << 30, "gpu_utilization": pytest.approx(0.7)}
        # Nothing has been sampled in the next epoch: memory is known at any time.
        assert monitor.close_epoch(group_with()) == {"gpu_memory_bytes": 3 << 30}
        assert monitor.memory_bytes == 3 << 30
    finally:
        monitor.close()
    assert "paceline-gpu" not in {thread.name for thread in threading.enumerate()}


def test_what_nobody_tells_is_left_out() -> None:
    monitor = monitor_of(Gpu(), peak=None)
    assert monitor.close_epoch(group_with((float("nan"), float("nan")))) == {}
    assert (monitor.memory_bytes, monitor.utilization) == (None, None)
    monitor.close()
