"""What nodes with disks of their own hold of a training, and which of it counts. Pure."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Self

from paceline.checkpoint.streaming import parse_sent
from paceline.errors import SnapshotError

NONE = -1
"""The step of no snapshot."""


@dataclass(frozen=True, kw_only=True)
class SnapshotInventory:
    """What one node has."""

    rank: int
    """Of the worker that looked."""
    host: str
    started: int
    """The highest generation that its host knows of."""
    step: int
    """Of its newest good snapshot; -1 where it has none."""
    generation: int
    """Of the start that took that snapshot."""
    start: str
    """The name of that start; empty where it isn't known."""
    manifest: str
    """That snapshot's."""
    best: str
    """The manifest of its best one; empty where none is marked."""

    @property
    def order(self) -> tuple[int, int]:
        """What makes one snapshot newer than another.

        A later start counts before a higher step: it knew of all snapshots that it could reach, and
        what a host then brings of an earlier one is a branch that was given up.
        """
        return self.generation, self.step

    def to_json(self) -> str:
        """Write it for the others."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, content: str) -> Self:
        """Read what another worker wrote."""
        return cls(**json.loads(content))


def newest(nodes: Sequence[SnapshotInventory]) -> SnapshotInventory | None:
    """Choose whose snapshot to go on from: the lowest rank of those that have the newest.

    Nodes that took it together may differ in what a script keeps for each worker by itself: the
    chosen one then holds for all.

    Raises:
        SnapshotError: Two nodes have different ones of the same step, of trainings that know
            nothing of each other.
    """
    holders = [node for node in nodes if node.step != NONE]
    if not holders:
        return None
    best = max(node.order for node in holders)
    first, *others = [node for node in holders if node.order == best]
    for other in others:
        together = first.start != "" and other.start == first.start
        if other.manifest != first.manifest and not together:
            raise SnapshotError(
                f"{_named(first)} and {_named(other)} have different snapshots of step "
                f"{first.step} ({_short(first)} and {_short(other)}), so that it isn't known which "
                "one to go on from: move it out of the run directory on one of them, which then "
                "takes over the other's"
            )
    return first


def choices_of_best(
    nodes: Sequence[SnapshotInventory], chosen: SnapshotInventory
) -> list[tuple[int, str]]:
    """List the best snapshots that nodes have marked, as (rank, manifest), the likeliest first.

    Nodes that have the chosen snapshot know best, and the later of two is the better one.
    """
    marked = [
        (node.order == chosen.order, parse_sent(node.best.encode()).step, -node.rank, node)
        for node in nodes
        if node.best
    ]
    marked = [entry for entry in marked if entry[1] <= chosen.step]
    marked.sort(key=lambda entry: entry[:3], reverse=True)
    return [(node.rank, node.best) for *_, node in marked]


def _named(node: SnapshotInventory) -> str:
    return f"{node.host} (rank {node.rank})"


def _short(node: SnapshotInventory) -> str:
    return f"manifest {sha256(node.manifest.encode()).hexdigest()[:12]}"
