"""Finds the snapshot to go on from: on a shared file system, or the newest that all nodes have."""

from collections.abc import Callable

import torch

from paceline.checkpoint.format import Snapshot, read_snapshot
from paceline.checkpoint.store import SnapshotStore
from paceline.dist.group import Group
from paceline.errors import SnapshotError

_NONE = -1


def newest_common(
    store: SnapshotStore, group: Group, report: Callable[[str], None], *, shared: bool
) -> Snapshot | None:
    """Read the newest good snapshot that every worker can read. Collective.

    Where all see one directory, rank 0 looks for it. Otherwise the first worker of each node looks
    on its own, and they agree on the newest step that all of them have. Damaged ones are set aside.

    Args:
        store: On a shared file system, or this node's own.
        group: The workers.
        report: Told of damaged snapshots, by the worker that met them.
        shared: Whether all nodes see the same directory.

    Returns:
        The same step on every worker; None where there is none at all.

    Raises:
        SnapshotError: Some nodes have snapshots and others have none of the same step.
    """
    looks = group.rank == 0 if shared else group.placement.local_rank == 0
    at_most: int | None = None
    while True:
        found = store.newest_good(report, at_most=at_most) if looks else None
        step = _NONE if found is None else found.step
        rows = group.gather_rows(torch.tensor([looks, step], dtype=torch.int64)).tolist()
        steps = [own for has_looked, own in rows if has_looked]
        if max(steps) == _NONE:
            return None
        if min(steps) == _NONE:
            without = [rank for rank, row in enumerate(rows) if row == [True, _NONE]]
            raise SnapshotError(
                f"the nodes of rank {', '.join(map(str, without))} have no snapshot that the "
                f"others have too: copy {store.directory} to them, or use a shared file system"
            )
        if min(steps) == max(steps):
            return found or read_snapshot(store.path_of(steps[0]))
        at_most = min(steps)
