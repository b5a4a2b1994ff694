"""A prediction for several numbers of nodes and all ways of combining gradients. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log

from paceline.gradient_sync.network_model import Cluster, Network
from paceline.gradient_sync.options import SyncOptions
from paceline.results.profile import StepProfile
from paceline.scaling.prediction import (
    Assumptions,
    Band,
    Predicted,
    library_of,
    predict,
    predict_band,
)
from paceline.scaling.prediction_inputs import NetworkLink

_FASTER = 1e4


@dataclass(frozen=True, kw_only=True)
class ForecastRequest:
    """What is to be predicted."""

    profile: StepProfile
    link: NetworkLink
    nodes: tuple[int, ...]
    """Ascending."""
    gpus_per_node: int = 1
    within: Network | None = None
    methods: tuple[SyncOptions, ...]
    pays: float = 0.8
    """Efficiency from which on a size pays."""
    price_per_hour: float | None = None
    """Of a node."""
    assumed: Assumptions = field(default_factory=Assumptions)
    measured: Mapping[tuple[SyncOptions, int], float] = field(default_factory=dict)
    """Efficiencies that are known, by method and nodes: recommendations use these."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """One way of combining gradients on all sizes."""

    method: SyncOptions
    sizes: tuple[Band, ...]

    @property
    def last(self) -> Predicted:
        """On the most nodes."""
        return self.sizes[-1].predicted


@dataclass(frozen=True, kw_only=True)
class Projection:
    """What is predicted."""

    request: ForecastRequest
    alone: Predicted
    """One node."""
    forecasts: tuple[Forecast, ...]
    needed_bytes_per_s: float | None = None
    """Of payload: with this link all-reduce would pay on the most nodes, with none if None."""


def project(request: ForecastRequest) -> Projection:
    """Predict all sizes with all methods.

    Raises:
        UsageError: See `predict`.
    """
    assumed = replace(request.assumed, link_uncertainty=request.link.uncertainty)
    resolved = replace(request, assumed=assumed)
    return Projection(
        request=resolved,
        alone=_at(resolved, SyncOptions(sync="allreduce"), 1),
        forecasts=tuple(
            Forecast(method=m, sizes=tuple(_band(resolved, m, n) for n in resolved.nodes))
            for m in resolved.methods
        ),
        needed_bytes_per_s=_needed_bytes_per_s(resolved),
    )


def _cluster(request: ForecastRequest, nodes: int, network: Network | None = None) -> Cluster:
    return Cluster(
        nodes=nodes,
        per_node=request.gpus_per_node,
        network=network or request.link.network,
        within=request.within,
        library=library_of(request.profile, request.assumed),
        shares_memory=request.profile.device == "cpu",
    )


def _at(
    request: ForecastRequest, method: SyncOptions, nodes: int, network: Network | None = None
) -> Predicted:
    cluster = _cluster(request, nodes, network)
    return predict(request.profile, method, cluster, request.assumed)


def _band(request: ForecastRequest, method: SyncOptions, nodes: int) -> Band:
    return predict_band(request.profile, method, _cluster(request, nodes), request.assumed)


def _needed_bytes_per_s(request: ForecastRequest) -> float | None:
    """Halve the range of bandwidths down to the lowest with which all-reduce pays."""
    plain, network = SyncOptions(sync="allreduce"), request.link.network

    def pays(log_per_s: float) -> bool:
        there = replace(network, bandwidth_bytes_per_s=exp(log_per_s))
        return _at(request, plain, request.nodes[-1], there).efficiency >= request.pays

    # Bisection in the logarithm, between the link as it is and one that is `_FASTER` times as fast.
    low = log(network.bandwidth_bytes_per_s)
    high = low + log(_FASTER)
    if pays(low):
        return network.bandwidth_bytes_per_s
    if not pays(high):
        return None
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return exp(high)


def every_prediction(projection: Projection) -> Sequence[Predicted]:
    """List all that was predicted, one node first."""
    return [projection.alone, *(b.predicted for f in projection.forecasts for b in f.sizes)]
