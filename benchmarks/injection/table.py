"""All kinds of faults, by name."""

from collections.abc import Mapping

from benchmarks.injection import disk, files, machine, processes, worker
from benchmarks.injection.draw import Traits
from benchmarks.injection.kind import Kind

KINDS: Mapping[str, Kind] = {
    kind.name: kind for module in (processes, worker, disk, files, machine) for kind in module.KINDS
}


def traits() -> dict[str, Traits]:
    """Give what a draw has to know of each."""
    return {name: kind.traits for name, kind in KINDS.items()}


def missing() -> dict[str, str]:
    """Name the kinds that can't be done on this machine, each with what is missing."""
    found = {name: kind.needs() for name, kind in KINDS.items()}
    return {name: why for name, why in found.items() if why}
