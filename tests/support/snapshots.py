"""Snapshots that a test puts into a store."""

from collections.abc import Callable
from pathlib import Path

from paceline.checkpoint.format import Snapshot, copy_to_host, no_phase
from paceline.checkpoint.store import SnapshotStore


def publish(
    store: SnapshotStore,
    snapshot: Snapshot,
    *,
    best: bool = False,
    phase: Callable[[str], None] = no_phase,
) -> Path:
    """Publish a snapshot from the tensors that it is of, and leave no spare directories."""
    try:
        return store.publish(copy_to_host(snapshot), best=best, phase=phase)
    finally:
        store.drop_spares()
