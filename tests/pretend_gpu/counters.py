"""What the pretend device has counted, in this process or in others."""

import ctypes
import struct
from collections import Counter
from itertools import pairwise
from pathlib import Path
from statistics import median_low

COUNTERS = (
    "launches", "products", "convolutions", "graphs", "h2d", "d2h", "d2d", "h2d_pageable",
    "d2h_pageable", "stream_syncs", "event_syncs", "device_syncs", "copy_syncs", "allocations",
    "pinned", "events", "waits", "collectives",
)  # fmt: skip
"""In the order of device/pretend.h."""
SYNCS = ("stream_syncs", "event_syncs", "device_syncs", "copy_syncs")


def counted_here() -> Counter[str]:
    """Read this process's counters."""
    device = ctypes.CDLL(None)
    device.pretend_gpu_counter.restype = ctypes.c_uint64
    return Counter({name: device.pretend_gpu_counter(i) for i, name in enumerate(COUNTERS)})


def counted_by_all(directory: Path) -> list[Counter[str]]:
    """Read what each process has left in PRETEND_GPU_COUNTERS, those that used a device."""
    found = []
    for path in sorted(path for path in directory.iterdir() if not path.suffix):
        values = struct.unpack(f"{len(COUNTERS)}Q", path.read_bytes())
        found.append(Counter(dict(zip(COUNTERS, values, strict=True))))
    return [each for each in found if each["launches"]]


def counted_a_step(directory: Path, skipped: int = 12) -> list[Counter[str]]:
    """Read what a step has cost each process, the median over all but the first steps.

    What happens twice a second, or once an epoch, is in few of them.

    Args:
        directory: PRETEND_GPU_COUNTERS of the training.
        skipped: Steps at the beginning that don't count: DDP times its first ten, with waits.

    Returns:
        By process; costs that are 0 are left out.
    """
    found = []
    for path in sorted(directory.glob("*.steps")):
        rows = [[int(word) for word in line.split()] for line in path.read_text().splitlines()]
        costs = [
            [after - before for before, after in zip(*pair, strict=True)]
            for pair in pairwise(rows[skipped:])
        ]
        middle = [median_low(column) for column in zip(*costs, strict=True)]
        found.append(Counter({n: c for n, c in zip(COUNTERS, middle, strict=True) if c}))
    return found
