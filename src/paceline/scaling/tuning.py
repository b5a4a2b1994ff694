"""What `paceline tune` tries, and what follows from its measurements. Pure."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, final

from paceline.options.fields import OptionValue
from paceline.options.figures import show_whole_percent

Kind = Literal["same bits", "rounding", "quality"]
"""What a change does to the result: nothing; other rounding; something that only a comparison of
whole trainings can judge."""

_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t at 0.975 for 1 degree of freedom, 2, ...; beyond them nearly the normal 1.96."""
_PRUNED_BELOW = (0.9, 1.0)
"""A change is given up below these means of its first pair, and of its first two."""
PAIRS = 3
"""Pairs of trials from which on a change is judged."""
_MIN_GAIN = 1.02
"""Below this a change isn't worth more trials."""
_LOADING = 0.03
"""Share of a step for waiting for batches, below which loader processes aren't looked at."""
_MAX_LOADERS = 4
_CHEAPER = ("bf16", "powersgd", "local")
"""Values of `--sync` that send fewer bytes: half of them, a hundredth, and in few steps."""
_MIN_SPLIT = 16
"""Samples of a worker's batch, below which cutting it in two isn't tried."""
_PIECES = (("halves", 2), ("quarters", 4))
"""Into how many a worker's batch is cut."""
COMPILING_S = 45.0
"""More time for the first trial that compiles: its first step counts."""
TRYING_KERNELS_S = 15.0
"""More time for a trial whose first step tries cuDNN's kernels out."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the first trial of the training as it is has shown."""

    device: str
    """Such as `cpu` or `cuda`."""
    nodes: int
    workers: int
    threads: int
    """Of each worker."""
    cores: int
    global_batch: int
    waits_for_data: float
    """Share of a step."""
    sync: str
    """How gradients are combined."""
    loader_workers: int | None
    """Processes that a script has settled for its loader; None where the option settles it."""
    channels_last: bool
    batchnorm_per_worker: bool
    """Whether results depend on how a batch is divided."""
    settings: Mapping[str, object]
    """Of the training, as `run.json` has them."""


@final
@dataclass(frozen=True, kw_only=True)
class Change:
    """Settings that may make a training faster."""

    name: str
    """Fit for a directory's name."""
    settings: Mapping[str, OptionValue]
    kind: Kind
    more_s: float = 0.0
    """What a trial of it needs beyond the usual seconds."""


@final
@dataclass(frozen=True, kw_only=True)
class Gain:
    """How much faster a change is than the training as it is: quotients of images a second."""

    ratios: tuple[float, ...] = ()
    """One a pair of trials, one after the other."""
    starting_s: tuple[float, ...] = ()
    """By pair: how much longer the first steps took."""
    problem: str | None = None

    @property
    def mean(self) -> float:
        """Geometric mean; NaN where nothing was measured."""
        return statistics.geometric_mean(self.ratios) if self.ratios else math.nan

    @property
    def bounds(self) -> tuple[float, float]:
        """95 % bounds of the mean, by Student's t over logarithms; infinite for a single pair."""
        count = len(self.ratios)
        if count < 2:
            return 0.0, math.inf
        logs = [math.log(ratio) for ratio in self.ratios]
        quantile = _T_975[count - 2] if count - 2 < len(_T_975) else 1.96
        half = quantile * statistics.stdev(logs) / math.sqrt(count)
        return self.mean * math.exp(-half), self.mean * math.exp(half)

    @property
    def should_prune(self) -> bool:
        """Whether it is so slow, or has failed, that no further pairs are tried."""
        if self.problem is not None:
            return True
        count = len(self.ratios)
        return 0 < count <= len(_PRUNED_BELOW) and self.mean < _PRUNED_BELOW[count - 1]

    @property
    def is_faster(self) -> bool:
        """Whether it is, as surely as 95 % bounds say."""
        return self.problem is None and len(self.ratios) >= PAIRS and self.bounds[0] > 1.0

    @property
    def is_settled(self) -> bool:
        """Whether further pairs would tell nothing new."""
        return self.is_faster or (len(self.ratios) >= PAIRS and self.bounds[1] < _MIN_GAIN)

    @property
    def start_s(self) -> float:
        """What it costs at the start, in seconds; 0 where that is less than can be seen."""
        first_s = max(self.starting_s, default=0.0)  # later ones find compiled code
        return first_s if first_s > 1.0 else 0.0

    @property
    def pays_after_s(self) -> float:
        """Length of a training, as it is now, from which on the change pays; 0 where always."""
        return self.start_s / (1 - 1 / self.mean) if self.mean > 1 else math.inf

    def with_pair(self, before: float, after: float, starting_s: float) -> "Gain":
        """Add a pair of trials.

        Args:
            before: Images a second of the training as it is.
            starting_s: How much longer its first steps took.
        """
        return Gain(
            ratios=(*self.ratios, after / before), starting_s=(*self.starting_s, starting_s)
        )


def list_changes(facts: Facts, given: Iterable[str] = ()) -> list[Change]:
    """List what may make a training faster, the most promising first.

    Args:
        given: Options that the user has settled: they stay as they are.
    """
    fixed = set(given)
    every = [
        *_compiled(facts),
        *_synchronized(facts),
        *_of_device(facts),
        *_divided(facts),
        *_loading(facts),
        *_trying_kernels(facts),
    ]
    own = facts.settings
    return [
        change
        for change in every
        if not any(n in fixed and value != own.get(n) for n, value in change.settings.items())
    ]


def _compiled(facts: Facts) -> Iterable[Change]:
    if facts.settings.get("compile") is not True:
        yield Change(
            name="compile", settings={"compile": True}, kind="rounding", more_s=COMPILING_S
        )


def _synchronized(facts: Facts) -> Iterable[Change]:
    """List cheaper ways of combining gradients, where they go over a network."""
    if facts.nodes > 1 and facts.settings.get("shards") is None:
        for method in _CHEAPER:
            if facts.sync != method:
                yield Change(name=f"sync-{method}", settings={"sync": method}, kind="quality")


def _of_device(facts: Facts) -> Iterable[Change]:
    """List number formats and how tensors lie in memory."""
    own = facts.settings
    if facts.channels_last:
        yield Change(name="contiguous", settings={"memory_format": "contiguous"}, kind="rounding")
    if facts.device != "cpu" and own.get("tf32") == "off":
        yield Change(name="tf32", settings={"tf32": "on"}, kind="quality")
    without = facts.device == "cuda" and own.get("cuda_graphs", "off") == "off"
    if without and not any(own.get(name) for name in ("shards", "compile", "sync_batchnorm")):
        # Compiled code refuses graphs: of the two one is taken.
        instead: Mapping[str, OptionValue] = {"cuda_graphs": "on", "compile": False}
        yield Change(name="cuda-graphs", settings=instead, kind="same bits")
    if own.get("precision") == "fp32" and own.get("shards") is None:
        yield Change(name="bf16", settings={"precision": "bf16"}, kind="quality")


def _divided(facts: Facts) -> Iterable[Change]:
    """List other ways to divide a batch: over workers, and over time."""
    own = facts.settings
    if own.get("shards") is not None:
        return  # they divide it
    kind: Kind = "quality" if facts.batchnorm_per_worker else "rounding"
    own_batch = own.get("batch_per_worker") is not None
    # Over hosts each has the workers that it was given.
    is_free = facts.device == "cpu" and facts.nodes == 1
    for workers in _divisors(facts.cores) if is_free else ():
        threads = facts.cores // workers
        others = workers != facts.workers
        if (others or threads != facts.threads) and not (others and own_batch):
            settings = {"workers": workers, "threads": threads}
            yield Change(name=f"{workers}x{threads}", settings=settings, kind=kind)
    batch = math.ceil(facts.global_batch / facts.workers)
    # Statistics of the whole batch need it at once.
    may_split = own.get("max_batch_per_worker") is None and own.get("sync_batchnorm") is not True
    # A GPU's cache may have room for a quarter alone.
    for name, pieces in _PIECES if facts.device != "cpu" else _PIECES[:1]:
        if may_split and 2 * batch >= pieces * _MIN_SPLIT:
            piece = {"max_batch_per_worker": math.ceil(batch / pieces)}
            yield Change(name=name, settings=piece, kind=kind)


def _loading(facts: Facts) -> Iterable[Change]:
    if facts.waits_for_data < _LOADING or facts.loader_workers is not None:
        return
    for count in (0, 1, 2, _MAX_LOADERS):
        if count != facts.settings.get("loader_workers") and count <= max(2, facts.cores):
            settings = {"loader_workers": count}
            yield Change(name=f"loaders-{count}", settings=settings, kind="same bits")


def _trying_kernels(facts: Facts) -> Iterable[Change]:
    own = facts.settings
    may_vary = not any(own.get(name) for name in ("shards", "deterministic", "cudnn_benchmark"))
    if facts.device == "cuda" and facts.channels_last and may_vary:
        yield Change(
            name="cudnn-benchmark",
            settings={"cudnn_benchmark": True},
            kind="rounding",
            more_s=TRYING_KERNELS_S,
        )


def advise_on_data(facts: Facts) -> str | None:
    """Say what faster data could bring, where steps wait for it and settings may not help."""
    if facts.waits_for_data < _LOADING:
        return None
    most = 1 / (1 - min(facts.waits_for_data, 0.99))
    return (
        f"Steps wait for their batch for {show_whole_percent(facts.waits_for_data)} of their "
        f"time: at most {most:.2f} times as fast if it were ready."
    )


def together(changes: Sequence[Change]) -> Change:
    """Make one of several changes."""
    kinds: tuple[Kind, ...] = ("same bits", "rounding", "quality")
    return Change(
        name="+".join(change.name for change in changes),
        settings={n: v for change in changes for n, v in change.settings.items()},
        kind=max((change.kind for change in changes), key=kinds.index),
        more_s=max(change.more_s for change in changes),
    )


def best_together(tried: Sequence["Tried"]) -> list["Tried"]:
    """Choose of those that may be taken what doesn't contradict each other, largest gain first."""
    chosen: list[Tried] = []
    recommended = [each for each in tried if each.is_recommended]
    for each in sorted(recommended, key=lambda each: -each.gain.mean):
        changed = {name for other in chosen for name in other.change.settings}
        if not changed.intersection(each.change.settings):
            chosen.append(each)
    return chosen


def keeps_quality(usual: Sequence[float], changed: Sequence[float]) -> bool:
    """Tell whether validation losses of a change are as good as those of the training as it is.

    The mean may be worse by one standard deviation between seeds, at least by a hundredth.

    Args:
        usual: Best validation loss by seed.
        changed: The same with the change.
    """
    between_seeds = statistics.stdev(usual) if len(usual) > 1 else 0.0
    mean = statistics.fmean(usual)
    return statistics.fmean(changed) <= mean + max(between_seeds, 0.01 * abs(mean))


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A change, and what came of it."""

    change: Change
    gain: Gain = field(default_factory=Gain)
    is_stopped: bool = False
    """Whether the user has stopped the tuning before this was settled."""
    losses: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    """Best validation losses by seed: of the training as it is, and changed; where compared."""

    @property
    def verdict(self) -> str:
        """Summarise the result in a few words."""
        gain = self.gain
        if gain.problem is not None:
            return f"failed: {gain.problem}"
        why = "stopped" if self.is_stopped else "no time left"
        if not gain.ratios:
            return f"not tried: {why}"
        if not gain.is_faster:
            is_known = len(gain.ratios) >= PAIRS or gain.should_prune
            return "no sure gain" if is_known else f"not settled: {why}"
        if self.change.kind != "quality":
            return "faster"
        if self.losses is None:
            return "faster; --check-quality would evaluate its result"
        return "faster, as good" if keeps_quality(*self.losses) else "faster, but worse"

    @property
    def is_recommended(self) -> bool:
        """Whether it is faster, and nothing speaks against its result."""
        if not self.gain.is_faster:
            return False
        if self.change.kind != "quality":
            return True
        return self.losses is not None and keeps_quality(*self.losses)
