"""Finds the snapshot to resume from: on a shared file system, or the newest that any node has.

Nodes with disks of their own hand it to those that lack it, so that the loss of a host never loses
the training.
"""

import json
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Self

import torch
from torch import Tensor

from paceline.checkpoint.format import Snapshot, manifest_text, read_snapshot
from paceline.checkpoint.state_encoding import require_entry
from paceline.checkpoint.store import SnapshotStore
from paceline.checkpoint.streaming import parse_sent
from paceline.distributed.group import Group
from paceline.errors import SnapshotError
from paceline.training.snapshots.model_weights import evaluated_weights
from paceline.training.snapshots.transfer import transfer_snapshot

Report = Callable[[str], None]

NONE = -1
"""The step of no snapshot."""


@dataclass(frozen=True, kw_only=True)
class SnapshotInventory:
    """Snapshots that one node has on its disk."""

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
        """Sort key: the newer snapshot's is greater.

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
    """Choose whose snapshot to resume from: the lowest rank of those that have the newest.

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
        # Nodes of one start took it together; then only per-worker states can differ.
        together = first.start != "" and other.start == first.start
        if other.manifest != first.manifest and not together:
            raise SnapshotError(
                f"{_named(first)} and {_named(other)} have different snapshots of step "
                f"{first.step} ({_short(first)} and {_short(other)}), so that it isn't known which "
                "one to resume from: move it out of the run directory on one of them, which then "
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


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The snapshot that a training resumes from, if any; the same on every worker."""

    snapshot: Snapshot | None
    """None where there is none."""
    generation: int
    """The number of this start: higher than that of every earlier one that is known of."""


@dataclass(frozen=True, kw_only=True)
class BestWeights:
    """The best snapshot's weights."""

    rank: int
    """Of the worker that has read them."""
    tensors: Mapping[str, Tensor]
    """By the model's own names; empty on all other workers."""


def find_origin(store: SnapshotStore, group: Group, report: Report, *, shared: bool) -> Origin:
    """Read the newest good snapshot that any node has. Collective.

    Where all see one directory, rank 0 looks for it. Otherwise the first worker of each node looks
    on its own; nodes that lack the newest one, or the best one, are given it. Damaged ones are set
    aside, and so are those of later steps on a branch that the training doesn't go on from.

    Args:
        store: On a shared file system, or this node's own.
        report: Told of what is set aside, by the worker that met it.

    Raises:
        SnapshotError: Two nodes have different snapshots that claim to be the same.
        InfrastructureError: A node has no room for what it is given; the same on every worker.
    """
    if not shared:
        return _of_nodes(store, group, report)
    found = store.newest_good(report) if group.rank == 0 else None
    found_step = torch.tensor([NONE if found is None else found.step])
    step = int(group.broadcast_(found_step))
    if step == NONE:
        return Origin(snapshot=None, generation=1)
    found = found or read_snapshot(store.path_of(step))
    return Origin(snapshot=found, generation=_generation_of(found) + 1)


def best_weights(
    store: SnapshotStore, group: Group, report: Report, *, shared: bool
) -> BestWeights | None:
    """Read the weights that the best snapshot was evaluated with, where it is. Collective.

    Args:
        store: On a shared file system, or this node's own; then the latest of all nodes' best ones
            counts.

    Returns:
        None where no node has one.
    """
    # Read it wherever a node has one.
    looks = group.rank == 0 if shared else group.placement.local_rank == 0
    path, step = store.best() if looks else None, NONE
    tensors: Mapping[str, Tensor] = {}
    if path is not None:
        try:
            found = read_snapshot(path)
        except SnapshotError as error:
            report(f"the best snapshot can't be read: {error}")
        else:
            step, tensors = found.step, evaluated_weights(found.tensors)
    # Of several nodes' the newest counts.
    steps = group.gather_rows(torch.tensor([step]))[:, 0].tolist()
    if max(steps) == NONE:
        return None
    rank = steps.index(max(steps))
    return BestWeights(rank=rank, tensors=tensors if rank == group.rank else {})


def _of_nodes(store: SnapshotStore, group: Group, report: Report) -> Origin:
    looks = group.placement.local_rank == 0
    started, at_most, fault = 0, None, ""
    # The newest snapshot that any node holds is given to those that lack it; else the one before.
    while True:
        found = store.newest_good(report, at_most=at_most, alone=False) if looks else None
        own = _inventory_of(store, group.rank, found) if looks else None
        inventories = group.gather_texts("" if own is None else own.to_json())
        nodes = [SnapshotInventory.from_json(text) for text in inventories if text]
        started = max(started, *(max(node.started, node.generation) for node in nodes))
        chosen = newest(nodes)
        if chosen is None:
            break
        is_missing = own is not None and own.manifest != chosen.manifest
        if is_missing:
            found = None  # what is of no use takes no memory meanwhile
        fault = transfer_snapshot(store, group, chosen.manifest, chosen.rank, is_missing=is_missing)
        if not fault:
            break
        if group.rank == chosen.rank:
            report(f"{fault}; another snapshot is tried")
            at_most = chosen.step - 1
    # From here on this start's snapshots are the newest, whatever lies beside them.
    if looks:
        _note(lambda: store.note_generation(started + 1), report)
    if chosen is None:
        return Origin(snapshot=None, generation=started + 1)
    if looks:
        store.set_aside_above(chosen.step, report)
    _share_best(store, group, report, choices_of_best(nodes, chosen))
    snapshot = found or read_snapshot(store.path_of(chosen.step))
    return Origin(snapshot=snapshot, generation=started + 1)


def _share_best(
    store: SnapshotStore, group: Group, report: Report, choices: list[tuple[int, str]]
) -> None:
    """Give all nodes the best snapshot that can be read, and mark it there. Collective."""
    looks = group.placement.local_rank == 0
    for rank, manifest in choices:
        step = parse_sent(manifest.encode()).step
        is_missing = looks and store.manifest(step) != manifest
        fault = transfer_snapshot(store, group, manifest, rank, is_missing=is_missing)
        if not fault:
            if looks and store.best() != store.path_of(step):
                _note(lambda: store.mark_best(step), report)  # noqa: B023  # called at once
            return
        if group.rank == rank:
            report(f"the best snapshot can't be read: {fault}")


def _note(write: Callable[[], None], report: Report) -> None:
    """Write down what a training can do without."""
    try:
        write()
    except OSError as error:
        report(f"{error.filename or 'the snapshots'} can't be written: {error.strerror}")


def _inventory_of(store: SnapshotStore, rank: int, snapshot: Snapshot | None) -> SnapshotInventory:
    best = store.best()
    return SnapshotInventory(
        rank=rank,
        host=socket.gethostname(),
        started=store.generation(),
        step=NONE if snapshot is None else snapshot.step,
        generation=0 if snapshot is None else _generation_of(snapshot),
        start="" if snapshot is None else str(require_entry(snapshot.state, "start")),
        manifest="" if snapshot is None else store.manifest(snapshot.step),
        best="" if best is None else manifest_text(best),
    )


def _generation_of(snapshot: Snapshot) -> int:
    number = require_entry(snapshot.state, "generation")
    return number if isinstance(number, int) else 0
