"""Fits the bandwidth of the cost model's network to the steps that a study has measured."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp, log, sqrt
from statistics import fmean

from paceline.errors import UsageError
from paceline.gradient_sync.cost_model import Compute, Machine, step_cost
from paceline.gradient_sync.network_model import Cluster, Network
from paceline.gradient_sync.options import SyncOptions

_MIN_PER_S, _MAX_PER_S = 1e4, 1e13
_POINTS, _NARROWINGS, _GOLDEN = 12, 24, (sqrt(5) - 1) / 2
_PLAUSIBLE_PER_S = (1e5, 4e11)
"""From 1 Mbit/s to 3.2 Tbit/s, what the fastest nodes have."""
_PLAIN = SyncOptions()
_FREE = Machine()


@dataclass(frozen=True, kw_only=True)
class SizeTime:
    """A size that was measured with all-reduce."""

    nodes: int
    per_node: int = 1
    step_s: float
    share: float = 1.0
    """Samples of a worker against those of the one that was measured alone."""


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """The network that fits measured sizes best."""

    network: Network
    relative_error: float
    """Root of the mean squared relative difference of the times."""
    by_size: tuple[float | None, ...]
    """Bytes per second that would explain each size alone; None where none would."""

    @property
    def is_plausible(self) -> bool:
        """Whether it is a network that may be: some size explains one, and none is out of range."""
        low, high = _PLAUSIBLE_PER_S
        known = any(rate is not None for rate in self.by_size)
        return known and low < self.network.bandwidth_bytes_per_s < high


def fit_link(compute: Compute, sizes: Sequence[SizeTime], cluster: Cluster) -> Fitted:
    """Find the bandwidth that explains steps on several numbers of nodes.

    Args:
        sizes: Measured with all-reduce on two nodes and more.
        cluster: Gives the round-trip, what is within a node, and the library.

    Raises:
        UsageError: There are no such sizes.
    """
    several = [size for size in sizes if size.nodes > 1]
    if not several:
        raise UsageError("nothing was measured on several nodes: say --link and --rtt")

    def relative_error(log_per_s: float) -> float:
        """Say by how much steps predicted at this bandwidth (natural log of bytes/s) are wrong."""
        return _rms_relative_error(
            [
                (size.step_s, _step_s(compute, size, _with(cluster, exp(log_per_s))))
                for size in several
            ]
        )

    # In the logarithm: bandwidths differ by orders of magnitude.
    best = lowest(relative_error, log(_MIN_PER_S), log(_MAX_PER_S))
    return Fitted(
        network=replace(cluster.network, bandwidth_bytes_per_s=exp(best)),
        relative_error=relative_error(best),
        by_size=tuple(_explaining(compute, size, cluster) for size in several),
    )


def _explaining(compute: Compute, size: SizeTime, cluster: Cluster) -> float | None:
    """Halve the range of bandwidths until the step takes as long as it took."""
    low, high = log(_MIN_PER_S), log(_MAX_PER_S)

    def takes_s(log_per_s: float) -> float:
        return _step_s(compute, size, _with(cluster, exp(log_per_s)))

    if not takes_s(high) < size.step_s < takes_s(low):
        return None
    # A step takes the longer, the lower the bandwidth.
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if takes_s(middle) > size.step_s else (low, middle)
    return exp(low)


def _step_s(compute: Compute, size: SizeTime, cluster: Cluster) -> float:
    there = replace(cluster, nodes=size.nodes, per_node=size.per_node)
    return step_cost(compute.scaled(size.share), _PLAIN, there, _FREE).step_s


def _with(cluster: Cluster, per_s: float) -> Cluster:
    return replace(cluster, network=replace(cluster.network, bandwidth_bytes_per_s=per_s))


def _rms_relative_error(pairs: Sequence[tuple[float, float]]) -> float:
    return sqrt(fmean((expected / measured - 1) ** 2 for measured, expected in pairs))


def lowest(of: Callable[[float], float], low: float, high: float) -> float:
    """Look for the lowest value: on a grid, then by the golden section around its best point."""
    # The grid finds the right valley: golden section alone needs a function with one minimum.
    width = (high - low) / _POINTS
    best = min((low + width * place for place in range(_POINTS + 1)), key=of)
    low, high = max(low, best - width), min(high, best + width)
    # Each turn keeps one of the two inner points, so it costs one evaluation (Kiefer, 1953).
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = of(left), of(right)
    for _ in range(_NARROWINGS):
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = of(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = of(right)
    return (low + high) / 2
