"""All options of a training, by component, and the request that workers are started with."""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from typing import Literal, Self

from paceline.checkpoint.options import SnapshotOptions
from paceline.data.options import DataOptions
from paceline.distributed.options import DistOptions
from paceline.errors import UsageError
from paceline.gradient_sync.options import SyncOptions, without_other_methods
from paceline.launch.options import LaunchOptions
from paceline.launch.restart_policy import STOP_S, Policy, StopGrace
from paceline.launch.watchdog.hang_detector import COMPILING_MIN_S, MIN_S, HangLimits
from paceline.metrics.options import MetricsOptions
from paceline.optim.options import SCHEDULE_DEFAULTS, OptimOptions
from paceline.optim.table import OPTIMIZER_OPTIONS, OPTIMIZERS
from paceline.options.fields import (
    OptionField,
    OptionValue,
    check_names,
    check_values,
    describe_type,
    fits,
    option_fields,
)
from paceline.training.options import ComputeOptions, LoopOptions

_COMPONENTS: Mapping[str, tuple[str, type]] = {
    "loop": ("Training", LoopOptions),
    "data": ("Data", DataOptions),
    "optim": ("Optimizer and learning rate", OptimOptions),
    "compute": ("Computation", ComputeOptions),
    "sync": ("Combining gradients", SyncOptions),
    "snapshots": ("Snapshots", SnapshotOptions),
    "metrics": ("Output", MetricsOptions),
    "launch": ("Workers", LaunchOptions),
    "dist": ("Workers", DistOptions),
}

OF_RECIPES = frozenset(option.name for option in option_fields(OptimOptions, "")).union(
    {"label_smoothing"}
) - {"clip_norm"}
"""Options that a script hasn't: it makes its optimizer, learning rate and loss itself."""
_BASIC = frozenset(
    "epochs target_accuracy patience early_stopping time_budget seed global_batch shards "
    "loader_workers optimizer lr momentum weight_decay warmup_epochs schedule precision "
    "snapshot_every progress tensorboard name workers device".split()
)
"""What `--help` shows: what most trainings are given, and each heading's first questions."""

_ONE_OF = (("global_batch", "batch_per_worker"), ("warmup_epochs", "warmup_steps"))
"""Options that say the same thing in two ways: giving one overrides the recipe's other."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The resolved options of a training, a component at a time."""

    loop: LoopOptions = field(default_factory=LoopOptions)
    data: DataOptions = field(default_factory=DataOptions)
    optim: OptimOptions = field(default_factory=OptimOptions)
    compute: ComputeOptions = field(default_factory=ComputeOptions)
    sync: SyncOptions = field(default_factory=SyncOptions)
    snapshots: SnapshotOptions = field(default_factory=SnapshotOptions)
    metrics: MetricsOptions = field(default_factory=MetricsOptions)
    launch: LaunchOptions = field(default_factory=LaunchOptions)
    dist: DistOptions = field(default_factory=DistOptions)

    @classmethod
    def from_settings(cls, settings: Mapping[str, OptionValue]) -> Self:
        """Build from flat names; what isn't named keeps its default.

        Raises:
            UsageError: An unknown name, a value out of range, or options that contradict.
        """
        check_names(settings, training_options(), "option")
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
        for name, value in values.items():
            expected = training_options()[name].annotation
            if not fits(value, expected):
                raise UsageError(f"{name} is {value!r}; it should be {describe_type(expected)}")
        check_values(values, training_options())
        groups = {}
        for key, (heading, component) in _COMPONENTS.items():
            names = {option.name for option in option_fields(component, heading)}
            groups[key] = component(**{n: v for n, v in values.items() if n in names})
        return cls(**groups)

    def settings(self) -> dict[str, OptionValue]:
        """List all options by their flat names, as they stand in `run.json`."""
        return {n: v for group in asdict(self).values() for n, v in group.items()}

    @property
    def worker_threads(self) -> int | None:
        """CPU threads that every worker has to have; None where a share of the cores will do.

        With shards never a share: it would follow the number of workers, and sums are split by it.
        """
        usual = None if self.data.shards is None else 1
        return usual if self.launch.threads is None else self.launch.threads

    def policy(self) -> Policy:
        """Say how often workers are started again, and after how long they hang."""
        return Policy(
            max_restarts=self.launch.max_restarts, hang=self.hang_limits(), stop=self.stop_grace()
        )

    def stop_grace(self, least_s: float = STOP_S) -> StopGrace:
        """Say how long workers may take to stop.

        Args:
            least_s: Without `--stop-grace-s`, where their steps and snapshots take no longer.
        """
        given_s = self.launch.stop_grace_s
        return (
            StopGrace(least_s=least_s)
            if given_s is None
            else StopGrace(least_s=given_s, most_s=given_s)
        )

    def hang_limits(self) -> HangLimits | None:
        """Give the limits after which workers count as hanging; None if they aren't watched."""
        usual_s = COMPILING_MIN_S if self.compute.compile else MIN_S
        given_s = self.launch.hang_after_s
        least_s = usual_s if given_s is None else given_s
        return HangLimits(least_s=least_s, timeout_s=self.dist.timeout_s) if least_s else None


@cache
def training_options() -> Mapping[str, OptionField]:
    """All options of a training by name, in the order of `--help`."""
    listed = {}
    for heading, component in _COMPONENTS.values():
        for option in option_fields(component, heading):
            if option.name in listed:
                raise TypeError(f"two components have an option {option.name!r}")
            listed[option.name] = replace(option, is_basic=option.name in _BASIC)
    return listed


def typed_name(name: str) -> str:
    """Give a setting's name as it is typed: with dashes, as all names are."""
    return name.replace("_", "-")


def compare_given(
    config: TrainConfig, given: Collection[str], name: str, value: OptionValue
) -> None:
    """Compare what a script says of an option with what the command line says.

    Args:
        given: Names of those that the command line or the environment gave.

    Raises:
        UsageError: They disagree.
    """
    settled = config.settings()[name]
    if name in given and settled != value:
        raise UsageError(
            f"the script has {name}={value}, and the command line or the environment says "
            f"{settled}: leave it out in one of the two places, or put what is meant for the "
            "script after --"
        )


def merge(
    given: Mapping[str, OptionValue], recipe_settings: Mapping[str, OptionValue]
) -> dict[str, OptionValue]:
    """Put the user's options over the recipe's.

    Where the user chooses another optimizer or schedule, the recipe's settings for its own one
    (its momentum, say) don't apply any more and are left out.

    Args:
        given: What the command line and the environment say.

    Returns:
        Flat settings; what neither names is left to the defaults.
    """
    merged = dict(recipe_settings)
    for pair in _ONE_OF:
        if any(name in given for name in pair):
            merged = {n: v for n, v in merged.items() if n not in pair}
    kept = {n: v for n, v in merged.items() if not _belongs_to_another(n, given)}
    return without_other_methods(kept, given) | dict(given)


def _belongs_to_another(name: str, given: Mapping[str, OptionValue]) -> bool:
    schedule = given.get("schedule")
    if name == "warmup_start" and 0 in (given.get("warmup_epochs"), given.get("warmup_steps")):
        return True
    chosen = [entry for n, entry in OPTIMIZERS.items() if n == given.get("optimizer")]
    if name in OPTIMIZER_OPTIONS and chosen:
        return name not in chosen[0].defaults
    if schedule == "one-cycle" and name.startswith("warmup_"):
        return True
    owners = [kind for kind, options in SCHEDULE_DEFAULTS.items() if name in options]
    return schedule is not None and bool(owners) and schedule not in owners


Kind = Literal["recipe", "script"]


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """What a worker process is started with: recipe or script, options, run directory."""

    recipe: str
    """The recipe's name as the user gave it."""
    reference: str
    """Where the recipe is, see `load_recipe`."""
    arguments: Mapping[str, OptionValue] = field(default_factory=dict)
    """The recipe's own arguments: what was given, and the defaults."""
    settings: Mapping[str, OptionValue]
    """Options of training, the recipe's and the user's; others keep their defaults."""
    given: tuple[str, ...]
    """Names of the options and arguments that the user gave."""
    run_dir: str = ""
    """Empty until it is settled where the training goes."""
    command: tuple[str, ...]
    """The command line, for `run.json`."""
    started_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    """ISO 8601, UTC; when it was requested."""
    kind: Kind = "recipe"
    """Whether `reference` is a recipe, or the path of a script."""
    script_args: tuple[str, ...] = ()
    """The script's own arguments."""
    allowed: tuple[str, ...] = ()
    """Options that may differ from those that the training began with."""
    run_dir_yields: bool = False
    """Whether the launcher chose `run_dir` and restarts the workers in one that a script names."""

    def to_json(self) -> str:
        """Write it as JSON text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote."""
        content = json.loads(text)
        given = {n: tuple(content[n]) for n in ("given", "command", "script_args", "allowed")}
        arguments = content["arguments"].items()
        own = {n: tuple(v) if isinstance(v, list) else v for n, v in arguments}
        return cls(**content | given | {"arguments": own})
