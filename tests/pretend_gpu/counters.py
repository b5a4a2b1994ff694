"""What the pretend device has counted, in this process or in others."""

import ctypes
import struct
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median_low

COUNTERS = (
    "launches", "products", "convolutions", "graphs", "h2d", "d2h", "d2d", "h2d_pageable",
    "d2h_pageable", "stream_syncs", "event_syncs", "device_syncs", "copy_syncs", "allocations",
    "pinned", "events", "waits", "collectives",
)  # fmt: skip
"""In the order of device/pretend.h."""
WARM_UP_STEPS = 12
"""At the beginning, whose costs don't count: DDP times its first ten, with waits."""
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


def counted_steps(directory: Path, skipped: int = WARM_UP_STEPS) -> list[list[Counter[str]]]:
    """Read what each step has cost each process, without what may wait (device/steps.py).

    Args:
        directory: PRETEND_GPU_COUNTERS of the training.
        skipped: Steps at the beginning that don't count.

    Returns:
        By process, the steps in order.
    """
    found = []
    for path in sorted(directory.glob("*.steps")):
        rows = [[int(word) for word in line.split()] for line in path.read_text().splitlines()]
        totals = [Counter(dict(zip(COUNTERS, row, strict=True))) for row in rows[skipped:]]
        found.append([after - before for before, after in pairwise(totals)])
    return found


def usual(steps: Sequence[Counter[str]], name: str) -> int:
    """Give what a step costs: half of what two in a row do, the median, rounded up.

    Some ways of training do something in every other step.
    """
    pairs = [before[name] + after[name] for before, after in pairwise(steps)]
    return -(-median_low(pairs) // 2)
