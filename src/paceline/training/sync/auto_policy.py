"""How `--sync auto` chooses by its measurements. Pure; imports no torch."""

import json
from dataclasses import asdict, dataclass, replace
from typing import Self, final

from paceline.errors import SnapshotError
from paceline.gradient_sync.cost_model import Compute, Machine, choose_local, efficiency, step_cost
from paceline.gradient_sync.network_model import Cluster, Network
from paceline.gradient_sync.options import SyncMethod, SyncOptions
from paceline.options.figures import show_time, show_whole_percent
from paceline.results.profile import StepProfile

ENOUGH = 0.10
"""Share of a step for communication that nothing hides, below which nothing is changed."""
TARGET = 0.9
"""Efficiency that local steps are chosen for."""
POWERSGD_TARGET = 0.85
"""Efficiency from which on PowerSGD will do: it costs less accuracy than they do."""
_GAIN = 0.95
"""A method that may change the result has to save more than a twentieth of the time."""
_SLOWEST, _FASTEST = 1e4, 1e12
"""Bytes per second between which the network is looked for."""
_HALVINGS = 60


@final
@dataclass(frozen=True, kw_only=True)
class Choice:
    """A way of combining gradients, and why."""

    method: SyncMethod
    why: str
    every: int = 1
    """With `local`: steps between two averages."""
    delay: int = 0
    powersgd_rank: int = SyncOptions.powersgd_rank
    """With `powersgd`: columns that are kept."""
    half_first: bool = False
    """With `local` and `powersgd`: whether bf16 is used until then."""
    from_epoch: int = 0
    """With `local`: the first epoch (from 0) that may have it."""

    @property
    def options(self) -> SyncOptions:
        """The same as options."""
        if self.method == "local":
            return SyncOptions(sync="local", sync_every=self.every, sync_delay=self.delay)
        if self.method == "powersgd":
            return SyncOptions(sync="powersgd", powersgd_rank=self.powersgd_rank)
        return SyncOptions(sync=self.method)

    @property
    def sends_half(self) -> bool:
        """Whether gradients travel in half precision, as long as they travel."""
        return self.method == "bf16" or self.half_first

    def to_json(self) -> str:
        """Write it as JSON text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote.

        Raises:
            SnapshotError: It is something else.
        """
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError) as error:
            raise SnapshotError(f"{text!r} is no choice of --sync auto") from error


def first_choice(profile: StepProfile | None) -> Choice | None:
    """Judge all-reduce by its steps; None where something else is worth a try."""
    if profile is None or profile.step_s.median <= 0:
        return Choice(method="allreduce", why="no step could be measured")
    share = exposed_share(profile)
    if share >= ENOUGH:
        return None
    why = f"communication that nothing hides takes {show_whole_percent(share)} of a step"
    return Choice(method="allreduce", why=why)


def final_choice(
    profile: StepProfile,
    allreduce_s: float,
    half_s: float,
    round_trip_s: float,
    *,
    powersgd_rank: int | None,
    may_be_local: bool,
) -> Choice:
    """Choose after bf16 has been tried as well.

    What changes results least goes first: bf16, PowerSGD, local steps.

    Args:
        profile: Of the steps with all-reduce.
        allreduce_s: Of such a step.
        half_s: Of a step with bf16.
        round_trip_s: Of a small message.
        powersgd_rank: Columns that PowerSGD would keep; None where it doesn't go with the other
            options.
        may_be_local: Whether local steps go with them.
    """
    share = exposed_share(profile)
    left = max(0.0, share * allreduce_s - (allreduce_s - half_s)) / half_s
    reason = (
        f"communication takes {show_whole_percent(share)} of a step of {show_time(allreduce_s)}"
    )
    # 1. bf16, where it is faster and leaves little to gain.
    half_gains = half_s < _GAIN * allreduce_s
    if half_gains and left < ENOUGH:
        why = (
            f"{reason}; with half the bytes it is {show_whole_percent(left)} of {show_time(half_s)}"
        )
        return Choice(method="bf16", why=why)
    reason += f", and {show_whole_percent(left)} of {show_time(half_s)} with half the bytes"
    # 2. PowerSGD, where it is predicted to be faster still.
    best = Choice(method="bf16" if half_gains else "allreduce", why=reason)
    model = _Model.of(profile, round_trip_s)
    best, best_s = _or_powersgd(best, half_s if half_gains else allreduce_s, model, powersgd_rank)
    if best.method == "powersgd" and model.efficiency(best.options) >= POWERSGD_TARGET:
        return best
    # 3. Local steps, which change results most.
    if not may_be_local:
        return replace(best, why=f"{best.why}; local steps don't go with the other options")
    return _or_local(best, best_s, model)


@final
@dataclass(frozen=True, kw_only=True)
class _Model:
    """Predicts steps on the network that explains the measured ones."""

    compute: Compute
    cluster: Cluster
    machine: Machine

    @classmethod
    def of(cls, profile: StepProfile, round_trip_s: float) -> Self:
        """Fit the network to a profile and the time of a small message."""
        return cls(
            compute=Compute.of(profile),
            cluster=fitted_cluster(profile, round_trip_s),
            machine=Machine.usual(profile.device),
        )

    def step_s(self, method: SyncOptions) -> float:
        """Predict the seconds of a step."""
        return step_cost(self.compute, method, self.cluster, self.machine).step_s

    def efficiency(self, method: SyncOptions) -> float:
        """Predict which fraction of a step is computation."""
        return efficiency(self.compute, method, self.cluster, self.machine)

    def describe(self, name: str, method: SyncOptions) -> str:
        """Write that fraction as a part of a sentence, for the log."""
        share = show_whole_percent(self.efficiency(method))
        return f"with {name}, {share} of the time should be computation"


def _or_powersgd(
    best: Choice, best_s: float, model: _Model, rank: int | None
) -> tuple[Choice, float]:
    """Put PowerSGD into the place of the best so far if it gains; give a step's time as well."""
    if rank is None:
        return best, best_s
    method = SyncOptions(sync="powersgd", powersgd_rank=rank)
    why = f"{best.why}; {model.describe(f'PowerSGD of rank {rank}', method)}"
    thin_s = model.step_s(method)
    if thin_s >= _GAIN * best_s:
        return replace(best, why=f"{why}, which saves too little"), best_s
    half_first = best.sends_half
    return Choice(method="powersgd", why=why, powersgd_rank=rank, half_first=half_first), thin_s


def _or_local(best: Choice, best_s: float, model: _Model) -> Choice:
    """Put local steps into the place of the best so far if they gain."""
    local = choose_local(model.compute, model.cluster, model.machine, TARGET)
    if model.step_s(local) >= _GAIN * best_s:
        return replace(best, why=f"{best.why}; local steps wouldn't be faster")
    label = model.describe(f"averages of weights every {local.sync_every} steps", local)
    return Choice(
        method="local",
        why=f"{best.why}; {label}",
        every=local.sync_every,
        delay=local.delay,
        half_first=best.sends_half,
    )


def exposed_share(profile: StepProfile) -> float:
    """Give the share of a step that is communication which nothing hides."""
    return profile.parts.exposed / profile.step_s.median


def fitted_cluster(profile: StepProfile, round_trip_s: float) -> Cluster:
    """Find the network that explains what the workers waited for each other's gradients.

    Args:
        profile: Of steps with all-reduce.
        round_trip_s: Of a small message.
    """
    compute, plain = Compute.of(profile), SyncOptions(sync="allreduce")
    low, high = _SLOWEST, _FASTEST
    cluster = Cluster(
        nodes=profile.world_size,
        network=Network(bandwidth_bytes_per_s=high, round_trip_s=round_trip_s),
        library="gloo" if profile.device == "cpu" else "nccl",
    )
    # Bisection on a logarithmic scale: a slower network has more exposed communication.
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        network = Network(bandwidth_bytes_per_s=middle, round_trip_s=round_trip_s)
        cluster = replace(cluster, network=network)
        if step_cost(compute, plain, cluster).exposed_s > profile.parts.exposed:
            low = middle
        else:
            high = middle
    return cluster
