"""Predicts seconds of collectives by the alpha-beta model (latency and bandwidth).

Thakur, Rabenseifner, Gropp: "Optimization of Collective Communication Operations in MPICH" (2005),
section 2.1: a message of S bytes takes a + S / B seconds. Imports no torch.
"""

from dataclasses import dataclass, replace
from math import ceil, inf, log2
from typing import Literal

Library = Literal["gloo", "nccl"]


@dataclass(frozen=True, kw_only=True)
class Network:
    """Latency and bandwidth of a network link."""

    bandwidth_bytes_per_s: float
    """Of payload, in each direction at the same time."""
    round_trip_s: float = 0.0
    """Of a small message and its answer."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Workers on nodes, and what they exchange gradients through."""

    nodes: int
    per_node: int = 1
    """Workers on each node, as neighbours in the ring."""
    network: Network
    """Between nodes: one link a node, which its workers share."""
    within: Network | None = None
    """Between the workers of a node, each with its own; None: as if it took no time."""
    library: Library = "gloo"
    """What carries the bytes. gloo: a ring, and a round-trip for each of its steps, since the
    receiver says that it is ready. nccl: ring or tree, whatever is faster, and half a round-trip a
    step."""

    shares_memory: bool = False
    """Whether with `--shards` the workers of a node add up in its memory, and one for each of its
    slices exchanges the sums with other nodes."""

    @property
    def between(self) -> "Cluster":
        """What exchanges the sums of `--shards`."""
        return replace(self, per_node=1) if self.shares_memory else self

    @property
    def workers(self) -> int:
        """All of them."""
        return self.nodes * self.per_node

    def all_reduce_s(self, size_bytes: float) -> float:
        """Say how long an all-reduce of so many bytes takes."""
        if self.workers == 1:
            return 0.0
        ring = self.ring_s(size_bytes)
        return min(ring, self.tree_s(size_bytes)) if self.library == "nccl" else ring

    def ring_s(self, size_bytes: float) -> float:
        """Say how long a ring over all workers takes.

        Each of 2 (n - 1) steps sends an n-th of the bytes to the next worker. With the workers of a
        node side by side every node's link is crossed once in each direction.
        """
        moved = 2 * (self.workers - 1) / self.workers * size_bytes
        return 2 * self._round_the_ring_s() + moved / self.slowest_bytes_per_s

    def tree_s(self, size_bytes: float) -> float:
        """Say how long two complementary binary trees over the nodes take, chains within each.

        Sanders, Speck, Träff: "Two-tree algorithms for full bandwidth broadcast, reduction and
        scan" (2009): every link carries the bytes twice in each direction.
        """
        up = ceil(log2(self.nodes)) * self._hop_s(self.network)
        up += (self.per_node - 1) * self._hop_s(self.within)
        return 2 * up + 2 * size_bytes / self.slowest_bytes_per_s

    def all_gather_s(self, size_bytes: float) -> float:
        """Say how long it takes until all have `size_bytes` of which each had its share."""
        if self.workers == 1:
            return 0.0
        moved = (self.workers - 1) / self.workers * size_bytes
        return self._round_the_ring_s() + moved / self.slowest_bytes_per_s

    def all_to_all_s(self, size_bytes: float) -> float:
        """Say how long it takes until everyone has sent everyone an n-th of `size_bytes`.

        Nothing is added on the way: a node's link carries what each of its workers sends to each
        worker of another node.
        """
        if self.workers == 1:
            return 0.0
        away = self.workers - self.per_node
        between = self.per_node * away / self.workers * size_bytes
        inside = (self.per_node - 1) / self.workers * size_bytes
        latency = self._hop_s(self.network if self.nodes > 1 else self.within)
        return latency + max(
            between / self.network.bandwidth_bytes_per_s,
            inside / (self.within.bandwidth_bytes_per_s if self.within else inf),
        )

    @property
    def slowest_bytes_per_s(self) -> float:
        """Of a ring's links the slowest sets the pace."""
        between = self.network.bandwidth_bytes_per_s if self.nodes > 1 else inf
        inside = self.within.bandwidth_bytes_per_s if self.within and self.per_node > 1 else inf
        return min(between, inside)

    def _round_the_ring_s(self) -> float:
        """Latency of a piece that goes from one worker on to all the others."""
        between = self.nodes - (self.per_node == 1) if self.nodes > 1 else 0
        inside = self.workers - 1 - between
        return between * self._hop_s(self.network) + inside * self._hop_s(self.within)

    def _hop_s(self, network: Network | None) -> float:
        if network is None:
            return 0.0
        return network.round_trip_s / (2 if self.library == "nccl" else 1)


def ring_bytes(size_bytes: float, workers: int) -> float:
    """Count what one worker sends in a ring all-reduce of so many bytes."""
    return 2 * (workers - 1) / workers * size_bytes
