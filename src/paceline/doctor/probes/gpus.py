"""GPUs of this host, and whether data arrives undamaged on all ways between them."""

from collections.abc import Iterator, Sequence
from itertools import product

from paceline.doctor.facts import GpuFacts

_KINDS = ("cuda", "xpu")
_ELEMENTS = 1 << 20
_STEP = 2654435761
"""Knuth's multiplier: neighbours differ in all bytes, so that pieces in wrong places show."""


def gpu_facts() -> GpuFacts:
    """Count the GPUs, and copy data between all of them. Claims a little memory on each."""
    import torch

    try:
        found = torch.accelerator.current_accelerator(check_available=True)
        if found is None or found.type not in _KINDS:
            return GpuFacts()
        module = torch.get_device_module(found)
        devices = [f"{found.type}:{i}" for i in range(torch.accelerator.device_count())]
        memory = [module.mem_get_info(device) for device in devices]
        return GpuFacts(
            kind=found.type,
            names=tuple(str(module.get_device_name(device)) for device in devices),
            memory_bytes=tuple(int(total) for _, total in memory),
            free_bytes=tuple(int(free) for free, _ in memory),
            wrong_copies=tuple(wrong_copies(devices)),
        )
    except RuntimeError as error:
        return GpuFacts(problem=str(error).splitlines()[0])


def wrong_copies(devices: Sequence[str]) -> Iterator[str]:
    """Copy a pattern from each device to each, and name the ways on which it was damaged.

    Some machines return zeros or old data from copies between GPUs (where the IOMMU or PCI access
    control is in the way) and report no error.

    Args:
        devices: As torch names them.
    """
    import torch

    pattern = torch.arange(_ELEMENTS, dtype=torch.int64) * _STEP
    for source, target in product(devices, repeat=2):
        sent = pattern.to(source, copy=True)
        arrived = torch.zeros_like(pattern, device=target)
        arrived.copy_(sent)
        if not torch.equal(arrived.cpu(), pattern):
            yield f"{source} to {target}"
