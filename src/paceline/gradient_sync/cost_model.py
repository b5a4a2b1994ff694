"""Cost model of a step: predicted seconds for each way of combining gradients.

Buckets travel one after another in the order in which the backward pass completes them:
`end = max(ready, previous end) + collective`; what ends after the backward pass is exposed. Li et
al.: "PyTorch Distributed" (VLDB 2020), section 3.2. Imports no torch.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, sqrt
from statistics import NormalDist
from typing import Self

from paceline.gradient_sync.bucketing import group_by_bytes
from paceline.gradient_sync.network_model import Cluster, ring_bytes
from paceline.gradient_sync.options import POWERSGD_BUCKETS, SyncOptions
from paceline.results.profile import STRETCH_S, Arrival, StepProfile

FIRST_BYTES = 1 << 20
"""Bytes at which DistributedDataParallel closes its first bucket."""
MAX_BYTES = 25 << 20
"""Bytes at which it closes the others."""
PASSES = {"bf16": 3.0, "powersgd": 8.0}
"""Bytes that are read or written in memory for each byte of fp32, counted in the arithmetic: two
casts; the correction, two products, the remainder and the result."""
_LONG_MATRIX = 3.0
"""A matrix of n numbers has rows and columns of about 3 sqrt(n) together: 2 sqrt(n) where it is
square, 2.9 sqrt(n) in VGG's largest, 3.3 sqrt(n) in convolutions of 3 x 3."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Costs of communication on a worker's own processor, besides waiting for it."""

    memory_bytes_per_s: float = inf
    """At which gradients are compressed."""

    @classmethod
    def usual(cls, device: str) -> Self:
        """Assume what is common: 5 GB/s for a worker on processors, 200 GB/s on a GPU."""
        return cls(memory_bytes_per_s=5e9 if device == "cpu" else 2e11)


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Computing time of one worker's step, and when its gradients are ready."""

    before_s: float
    """Until the backward pass begins: data and forward."""
    backward_s: float
    after_s: float = 0.0
    """Optimizer and the rest."""
    gradients: tuple[Arrival, ...]
    """In the order in which the backward pass makes them."""
    parameter_bytes: int
    jitter_s: float = 0.0
    """Standard deviation of one worker's steps, but for the few that take very long."""
    uneven_s: float = 0.0
    """Standard deviation between workers that lasts from step to step."""
    bucket_bytes: int | None = None
    """Where all buckets are closed, the first as well. Default: as DistributedDataParallel does."""

    @classmethod
    def of(cls, profile: StepProfile) -> Self:
        """Read it from a profile, also of several workers: their waits are left out."""
        parts = profile.parts
        own = [worker.compute_s for worker in profile.workers]
        spreads = [worker.spread_s for worker in profile.workers]
        return cls(
            before_s=parts.data + parts.forward,
            backward_s=parts.backward,
            after_s=parts.optimizer + parts.other,
            gradients=_within(parts.backward, _arrivals(profile)),
            parameter_bytes=profile.parameter_bytes,
            jitter_s=min(sqrt(_mean(s * s for s in spreads)), _usual_spread_s(profile)),
            uneven_s=sqrt(_mean((c - _mean(own)) ** 2 for c in own)),
        )

    @property
    def step_s(self) -> float:
        """A whole step of a worker alone."""
        return self.before_s + self.backward_s + self.after_s

    @property
    def gradient_bytes(self) -> int:
        """All gradients."""
        return sum(arrival.bytes for arrival in self.gradients)

    def scaled(self, share: float) -> "Compute":
        """Scale it to another number of samples; what follows the backward pass doesn't change."""
        if share == 1:
            return self
        return replace(
            self,
            before_s=self.before_s * share,
            backward_s=self.backward_s * share,
            gradients=tuple(Arrival(at_s=a.at_s * share, bytes=a.bytes) for a in self.gradients),
            jitter_s=self.jitter_s * share,
            uneven_s=self.uneven_s * share,
        )

    def slower(self, factor: float) -> "Compute":
        """Scale it to a device that is slower by a factor."""
        return replace(self.scaled(factor), after_s=self.after_s * factor)


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Predicted seconds of a step by what they are spent on, averaged over steps."""

    compute_s: float
    exposed_s: float
    """Communication that no computation hides."""
    codec_s: float = 0.0
    """Compressing."""
    waiting_s: float = 0.0
    """For the slowest worker."""
    sent_bytes: float = 0.0
    """By one worker."""

    @property
    def step_s(self) -> float:
        """All of it."""
        return self.compute_s + self.exposed_s + self.codec_s + self.waiting_s


_NO_MACHINE = Machine()


def step_cost(
    compute: Compute, method: SyncOptions, cluster: Cluster, machine: Machine = _NO_MACHINE
) -> StepCost:
    """Predict a step.

    Args:
        compute: What one worker does by itself.
        method: The `--sync` method; None is taken as all-reduce.
        cluster: Where.
        machine: What compression costs.
    """
    if cluster.workers == 1:
        return StepCost(compute_s=compute.step_s, exposed_s=0.0)
    if method.sync == "powersgd":
        cost = _powersgd(compute, method.powersgd_rank, cluster, machine)
    else:
        cost = _averaged(compute, method, cluster, machine)
    return replace(
        cost,
        waiting_s=expected_maximum(cluster.workers)
        * sqrt(compute.uneven_s**2 + compute.jitter_s**2),
    )


def buckets(gradients: Sequence[Arrival], most: int | None = None) -> list[Arrival]:
    """Put gradients into the buckets of DistributedDataParallel: when each is ready, its bytes.

    A gradient that overfills a bucket stays in it: none is split.

    Args:
        gradients: In the order in which the backward pass makes them.
        most: Bytes at which every bucket is closed. Default: 1 MiB for the first, then 25 MiB.
    """
    first, others = (most, most) if most else (FIRST_BYTES, MAX_BYTES)
    groups = _grouped(gradients, first, others)
    done = [Arrival(at_s=group[-1].at_s, bytes=sum(a.bytes for a in group)) for group in groups]
    return [bucket for bucket in done if bucket.bytes]


def _grouped(gradients: Sequence[Arrival], first: int, most: int) -> Iterator[list[Arrival]]:
    for places in group_by_bytes([arrival.bytes for arrival in gradients], first, most):
        yield [gradients[place] for place in places]


def expected_maximum(number: int) -> float:
    """Expect this of the largest of so many standard normal numbers.

    Blom: "Statistical Estimates and Transformed Beta-Variables" (1958): the quantile at
    (n - 3/8) / (n + 1/4).
    """
    return 0.0 if number < 2 else NormalDist().inv_cdf((number - 0.375) / (number + 0.25))


def method_label(method: SyncOptions) -> str:
    """Name a method with the options that count, as `allreduce bf16`."""
    name = method.sync or "allreduce"
    if method.sync_precision != "fp32":
        return f"{name} {method.sync_precision}"
    return f"{name} rank {method.powersgd_rank}" if name == "powersgd" else name


def _averaged(
    compute: Compute, method: SyncOptions, cluster: Cluster, machine: Machine
) -> StepCost:
    """All-reduce of buckets, each in full or in half as many bytes, or the ordered exchange."""
    half = method.sync_precision == "bf16"
    share = 0.5 if half else 1.0
    end_s = 0.0
    for bucket in buckets(compute.gradients, compute.bucket_bytes):
        size = bucket.bytes * share
        if method.sync == "ordered":
            between = cluster.between
            takes_s = between.all_to_all_s(size) + between.all_gather_s(size)
        else:
            takes_s = cluster.all_reduce_s(size)
        # A bucket starts when it is ready and the one before has ended.
        end_s = max(bucket.at_s, end_s) + takes_s
    codec = PASSES["bf16"] * compute.gradient_bytes / machine.memory_bytes_per_s if half else 0.0
    return StepCost(
        compute_s=compute.step_s,
        exposed_s=max(0.0, end_s - compute.backward_s),
        codec_s=codec,
        sent_bytes=ring_bytes(compute.gradient_bytes * share, cluster.workers),
    )


def _powersgd(compute: Compute, rank: int, cluster: Cluster, machine: Machine) -> StepCost:
    """In each bucket one factor is averaged, then the other; buckets one after another."""
    sent = powersgd_bytes(compute.gradients, rank)
    full, end_s = ceil(compute.gradient_bytes / POWERSGD_BUCKETS), 0.0
    for bucket in _grouped(compute.gradients, full, full):
        thin = powersgd_bytes(bucket, rank)
        end_s = max(bucket[-1].at_s, end_s) + 2 * cluster.all_reduce_s(thin / 2)
    return StepCost(
        compute_s=compute.step_s,
        exposed_s=max(0.0, end_s - compute.backward_s),
        codec_s=PASSES["powersgd"] * compute.gradient_bytes / machine.memory_bytes_per_s,
        sent_bytes=ring_bytes(sent, cluster.workers),
    )


def powersgd_bytes(gradients: Iterable[Arrival], rank: int) -> float:
    """Estimate the bytes of PowerSGD's two factors; shapes aren't known, only sizes."""
    thin = ((a.bytes, 4 * _LONG_MATRIX * rank * sqrt(a.bytes / 4)) for a in gradients)
    return sum(factors if 2 * factors <= whole else whole for whole, factors in thin)


def _usual_spread_s(profile: StepProfile) -> float:
    """Give the spread of steps without the few that took very long.

    What was measured are means of stretches, which differ less than the steps in them.
    """
    step_s = profile.step_s
    # Means of n steps vary by 1 / sqrt(n).
    steps = max(1.0, STRETCH_S / step_s.median) if step_s.median > 0 else 1.0
    return step_s.deviation * sqrt(steps)


def _arrivals(profile: StepProfile) -> tuple[Arrival, ...]:
    """Give the measured arrivals; where there are none, as if they came evenly."""
    if profile.gradients:
        return profile.gradients
    total, backward_s = profile.gradient_bytes or profile.parameter_bytes, profile.parts.backward
    pieces = max(1, round(total / MAX_BYTES))
    return tuple(
        Arrival(at_s=backward_s * (piece + 1) / pieces, bytes=total // pieces)
        for piece in range(pieces)
    )


def _within(backward_s: float, gradients: tuple[Arrival, ...]) -> tuple[Arrival, ...]:
    """Scale arrivals so that the last one ends the backward pass: both are of different steps."""
    last_s = max((arrival.at_s for arrival in gradients), default=0.0)
    # Later than the backward pass: scale all down; earlier: shift all to its end.
    squeeze = min(1.0, backward_s / last_s) if last_s > 0 else 1.0
    late_s = backward_s - last_s * squeeze
    return tuple(Arrival(at_s=a.at_s * squeeze + late_s, bytes=a.bytes) for a in gradients)


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0
