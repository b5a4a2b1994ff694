"""Launcher and workers find GPUs in the same way, without torch."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paceline.distributed import system_gpus
from paceline.distributed.device import gpu_count
from paceline.distributed.system_gpus import may_have_gpus


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    may_have_gpus.cache_clear()
    yield
    may_have_gpus.cache_clear()


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has these files")
@pytest.mark.parametrize(
    ("devices", "library", "expected"),
    [
        ((), "libno-such-driver.so.1", False),
        (("/dev/null",), "libno-such-driver.so.1", True),
        ((), "libc.so.6", True),  # as in a container that has no device files
    ],
)
def test_a_driver_is_found_by_its_device_or_its_library(
    devices: tuple[str, ...], library: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system_gpus, "_DEVICES", devices)
    monkeypatch.setattr(system_gpus, "_NVML", library)
    assert may_have_gpus() is expected


def test_a_worker_uses_no_gpu_that_its_launcher_has_not_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(system_gpus, "_DEVICES", (str(Path(__file__)),))
    assert gpu_count() == 2
    may_have_gpus.cache_clear()
    monkeypatch.setattr(system_gpus, "_DEVICES", ())
    monkeypatch.setattr(system_gpus, "_NVML", "libno-such-driver.so.1")
    assert gpu_count() == 0


def test_torch_is_not_imported_for_it() -> None:
    program = (
        "import sys, paceline.distributed.system_gpus as d; d.may_have_gpus(); print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "torch" not in done.stdout.split()
