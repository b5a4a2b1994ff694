"""Predicts how a training would scale on hosts that aren't there yet, and how sure that is."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import ceil, exp, expm1, log2, sqrt
from random import Random
from statistics import quantiles

from paceline.errors import UsageError
from paceline.gradient_sync.cost_model import Compute, Machine, StepCost, method_label, step_cost
from paceline.gradient_sync.network_model import Cluster, Library, Network
from paceline.gradient_sync.options import SyncOptions
from paceline.results.profile import StepProfile
from paceline.results.study import Mode

MODEL_UNCERTAINTY = 0.08
"""Relative standard deviation of the time that communication takes against the model's, where it
has been compared (see docs/internals/prediction.md): up to 8 nodes."""
_UNCERTAINTY_PER_DOUBLING = 0.03
_COMPARED_NODES = 8
_WAITING_UNCERTAINTY = 0.4
"""How long the slowest of many keeps the others waiting is known much worse."""
_MIN_COMPUTE_UNCERTAINTY = 0.01
_USUAL_INTERVAL_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What a prediction takes as given besides the profile and the network."""

    mode: Mode = "weak"
    library: Library | None = None
    """Default: nccl for GPUs, gloo else."""
    machine: Machine | None = None
    """Default: what is common for the device."""
    mtbf_s: float | None = None
    """Mean time between failures of one node; None: none fails."""
    restart_s: float = 120.0
    """From a failure until the training goes on from its snapshot."""
    snapshot_every_s: float | None = None
    """Default: an epoch, or 10 minutes where its length isn't known."""
    link_uncertainty: float = 0.1
    """Relative standard deviation of the bandwidth."""
    draws: int = 101
    """How often a band draws other numbers, at least twice."""


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """A training on so many nodes."""

    method: SyncOptions
    nodes: int
    workers: int
    global_batch: int
    parts: StepCost
    """Of a step."""
    available: float
    """Share of the time in which nothing has failed."""
    efficiency: float
    """Against one worker of the profile, without epochs' fixed costs, with failures."""
    images_per_s: float
    """With failures."""
    epoch_s: float | None
    """With evaluation, snapshot, loader start and failures; None: nobody knows how many steps."""
    fixed_s: float
    """What of that isn't steps, whatever the method."""

    @property
    def step_s(self) -> float:
        """One step."""
        return self.parts.step_s

    @property
    def label(self) -> str:
        """Of the method."""
        return method_label(self.method)


@dataclass(frozen=True, kw_only=True)
class Range:
    """A tenth of the draws is below, a tenth above."""

    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Band:
    """A prediction, and how far off it may be."""

    predicted: Predicted
    efficiency: Range
    step_s: Range
    images_per_s: Range
    epoch_s: Range | None


_USUAL = Assumptions()


def predict(
    profile: StepProfile, method: SyncOptions, cluster: Cluster, assumed: Assumptions = _USUAL
) -> Predicted:
    """Predict a training from the profile of another one, ideally of one worker.

    Args:
        profile: What it measured. What several workers waited for is left out.

    Raises:
        UsageError: With strong scaling there are more workers than samples in a step.
    """
    return _predict(profile, Compute.of(profile), method, cluster, assumed)


def predict_band(
    profile: StepProfile, method: SyncOptions, cluster: Cluster, assumed: Assumptions = _USUAL
) -> Band:
    """Predict with an uncertainty band, by Monte Carlo over the numbers that aren't sure.

    The draws are the same in every call. Arguments and errors are those of `predict`.
    """
    compute = Compute.of(profile)
    # Monte Carlo over what isn't sure: the link, the device's speed, the waiting.
    drawn = [
        _predict(profile, compute, method, drawn_cluster, assumed, factors)
        for drawn_cluster, factors in _draws(profile, cluster, assumed)
    ]

    def spread(of: Callable[[Predicted], float]) -> Range:
        """Give the middle 80 % of the draws: from the first to the ninth decile."""
        cuts = quantiles((of(one) for one in drawn), n=10, method="inclusive")
        return Range(low=cuts[0], high=cuts[-1])

    knows_epochs = drawn[0].epoch_s is not None
    return Band(
        predicted=_predict(profile, compute, method, cluster, assumed),
        efficiency=spread(lambda one: one.efficiency),
        step_s=spread(lambda one: one.step_s),
        images_per_s=spread(lambda one: one.images_per_s),
        epoch_s=spread(lambda one: one.epoch_s or 0.0) if knows_epochs else None,
    )


@dataclass(frozen=True, kw_only=True)
class _Factors:
    """One draw of the Monte Carlo: times are those of the model, multiplied by these."""

    compute: float = 1.0
    """Of a worker alone, on the hosts to come as on the one that was measured."""
    waiting: float = 1.0


def _draws(
    profile: StepProfile, cluster: Cluster, assumed: Assumptions
) -> Iterator[tuple[Cluster, _Factors]]:
    random = Random(0)
    # Uncertainties add up in quadrature; the model's grows beyond the nodes it was compared on.
    beyond = max(0.0, log2(cluster.nodes / _COMPARED_NODES))
    uncertainty = sqrt(
        assumed.link_uncertainty**2 + (MODEL_UNCERTAINTY + _UNCERTAINTY_PER_DOUBLING * beyond) ** 2
    )
    compute_uncertainty = max(_MIN_COMPUTE_UNCERTAINTY, _step_uncertainty(profile))
    # Factors are log-normal. A slower link is so between nodes and within them alike.
    for _ in range(assumed.draws):
        factor = exp(random.gauss(0.0, uncertainty))
        within = cluster.within and _slower(cluster.within, factor)
        factors = _Factors(
            compute=exp(random.gauss(0.0, compute_uncertainty)),
            waiting=exp(random.gauss(0.0, _WAITING_UNCERTAINTY)),
        )
        yield replace(cluster, network=_slower(cluster.network, factor), within=within), factors


def _step_uncertainty(profile: StepProfile) -> float:
    """How well the median step is known: what stretches differ by, over the root of their number.

    About one step of each stretch is looked at. 1.253: a median's standard error against a
    mean's.
    """
    step_s = profile.step_s
    return 1.253 * step_s.deviation / step_s.median / sqrt(max(1, profile.steps_seen))


def _slower(network: Network, factor: float) -> Network:
    return Network(
        bandwidth_bytes_per_s=network.bandwidth_bytes_per_s / factor,
        round_trip_s=network.round_trip_s * factor,
    )


_AS_MEASURED = _Factors()


def _predict(
    profile: StepProfile,
    compute: Compute,
    method: SyncOptions,
    cluster: Cluster,
    assumed: Assumptions,
    factors: _Factors = _AS_MEASURED,
) -> Predicted:
    workers, batch = cluster.workers, profile.global_batch / profile.world_size
    global_batch = profile.global_batch if assumed.mode == "strong" else round(batch * workers)
    if workers > global_batch:
        raise UsageError(
            f"{workers:,} workers can't share a global batch of {global_batch:,}. Predict fewer "
            "nodes, or --mode weak, in which the batch grows with them"
        )
    # Strong scaling divides the batch, so that shares shrink; weak scaling keeps them (about 1).
    share = global_batch / workers / batch
    alone = compute.scaled(global_batch / batch).step_s if assumed.mode == "strong" else None
    machine = assumed.machine or Machine.usual(profile.device)
    cost = step_cost(compute.scaled(share).slower(factors.compute), method, cluster, machine)
    cost = replace(cost, waiting_s=cost.waiting_s * factors.waiting)
    fixed_s = _fixed_s(profile, workers)
    # An epoch: its steps, what each costs besides them, and what failures take.
    steps = ceil(profile.steps_per_epoch * profile.global_batch / global_batch)
    epoch_s = steps * cost.step_s + fixed_s if steps else None
    available = _available(cluster.nodes, epoch_s, assumed)
    # Strong: one worker's time for the whole batch, divided; weak: one worker's own step.
    ideal_s = factors.compute * (alone / workers if alone is not None else compute.step_s)
    return Predicted(
        method=method,
        nodes=cluster.nodes,
        workers=workers,
        global_batch=global_batch,
        parts=cost,
        available=available,
        efficiency=min(1.0, ideal_s / cost.step_s) * available,
        images_per_s=global_batch / cost.step_s * available,
        epoch_s=None if epoch_s is None else epoch_s / available,
        fixed_s=fixed_s,
    )


def _fixed_s(profile: StepProfile, workers: int) -> float:
    """Evaluation is shared by the workers; a snapshot and the start of a pass aren't."""
    costs = profile.epoch
    evaluation_s = (costs.evaluation_s or 0.0) * profile.world_size / workers
    return evaluation_s + (costs.snapshot_s or 0.0) + (costs.loader_start_s or 0.0)


def _available(nodes: int, epoch_s: float | None, assumed: Assumptions) -> float:
    """Compute the share of the time that is useful where nodes fail.

    Failures come at random, at a rate of nodes / mtbf, and each throws the training back to its
    last snapshot. Daly: "A higher order estimate of the optimum checkpoint interval for restart
    dumps" (2006), with a snapshot that costs nothing: it is counted elsewhere.
    """
    if assumed.mtbf_s is None:
        return 1.0
    rate = nodes / assumed.mtbf_s
    interval_s = snapshot_interval_s(epoch_s, assumed)
    if rate * (interval_s + assumed.restart_s) > 100:
        return 1e-9  # it never gets from one snapshot to the next
    return rate * interval_s / (exp(rate * assumed.restart_s) * expm1(rate * interval_s))


def snapshot_interval_s(epoch_s: float | None, assumed: Assumptions) -> float:
    """Give the time between two snapshots.

    Args:
        epoch_s: Without failures.
        assumed: May say it.
    """
    return assumed.snapshot_every_s or epoch_s or _USUAL_INTERVAL_S


def cost_per_epoch(predicted: Predicted, price_per_hour: float) -> float | None:
    """Give what an epoch costs where a node has a price; None where its length isn't known."""
    if predicted.epoch_s is None:
        return None
    return predicted.nodes * price_per_hour * predicted.epoch_s / 3600


def library_of(profile: StepProfile, assumed: Assumptions) -> Library:
    """Name what would carry the bytes."""
    return assumed.library or ("gloo" if profile.device == "cpu" else "nccl")
