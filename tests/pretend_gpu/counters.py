"""What the pretend device has counted, in this process or in others."""

import ctypes
import struct
from collections import Counter
from pathlib import Path

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
    for path in sorted(directory.iterdir()):
        values = struct.unpack(f"{len(COUNTERS)}Q", path.read_bytes())
        found.append(Counter(dict(zip(COUNTERS, values, strict=True))))
    return [each for each in found if each["launches"]]
