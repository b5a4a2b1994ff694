"""Reads an earlier run's `run.json`, and checks which settings may change on resuming."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Self, cast

from paceline.checkpoint.options import SnapshotOptions
from paceline.distributed.options import OF_THIS_PROCESS, DistOptions
from paceline.errors import UsageError
from paceline.gradient_sync.options import SyncOptions, without_other_methods
from paceline.launch.options import LaunchOptions
from paceline.metrics.options import MetricsOptions
from paceline.options.fields import OptionValue, flag, unknown_name
from paceline.results.run_directory import RunDirectory
from paceline.training.config import Kind, TrainConfig, training_options, typed_name

FREE = frozenset(
    field.name
    for component in (LaunchOptions, DistOptions, MetricsOptions, SnapshotOptions, SyncOptions)
    for field in fields(component)
) | {
    "loader_workers",
    "max_batch_per_worker",
    "check_every",
    "allow_different_hardware",
    "deterministic",
    "cudnn_benchmark",
    "fused",
}
"""Options that don't change what is trained, or in what is announced as another way to the same
(`--sync`): a resumed training may have others."""

WITH_SHARDS = frozenset({"threads", "max_batch_per_worker", "fused"})
"""Options that the bits depend on: free without `--shards` alone."""

_OF_ONE_START = ("workers", "on", "progress", *OF_THIS_PROCESS)
"""Options of one start of a training, not of the training."""

_LISTED = "`paceline resume RUN_DIR --help-all` lists all"
_SAMPLES = "since it settles which samples a step sees"
FIXED: Mapping[str, str] = {
    "seed": _SAMPLES,
    "global_batch": _SAMPLES,
    "batch_per_worker": _SAMPLES,
    "drop_last": _SAMPLES,
    "optimizer": "since the snapshots hold the state of the run's own",
    "shards": "since it settles which samples are computed together and how gradients are summed",
}
"""Options that can't change within a training, and why."""


@dataclass(frozen=True, kw_only=True)
class PreviousRun:
    """Settings and recipe of an earlier run, from its run directory."""

    recipe: str
    reference: str
    arguments: Mapping[str, OptionValue]
    settings: Mapping[str, OptionValue]
    """All options of training, as they were resolved."""
    given: tuple[str, ...]
    world_size: int
    """Workers that it was last started with."""
    steps_per_epoch: int
    """0 where epochs have no fixed length."""
    is_complete: bool = False
    """Whether the newest snapshot has all epochs that the training was to have."""
    kind: Kind = "recipe"
    script_args: tuple[str, ...] = ()

    @classmethod
    def read(cls, run: RunDirectory) -> Self:
        """Read `run.json`.

        Raises:
            UsageError: There is none, or another version of Paceline wrote it.
        """
        content = run.read_run()
        try:
            derived = cast(Mapping[str, OptionValue], content["derived"])
            saved = cast(Mapping[str, OptionValue], content["settings"])
            settings = {name: saved[name] for name in training_options()}
            # The global batch stays what it was, on any number of workers.
            settings |= {"global_batch": derived["global_batch"], "batch_per_worker": None}
            for name in _OF_ONE_START:
                settings.pop(name, None)
            length = _count(derived, "steps_per_epoch", 0)
            epochs = _count(settings, "epochs", 1)
            return cls(
                recipe=str(content["recipe"]),
                reference=str(content["reference"]),
                arguments=_tuples(cast(Mapping[str, OptionValue], content["recipe_arguments"])),
                settings=_tuples(settings),
                given=tuple(
                    name
                    for name in cast(Sequence[str], content["given"])
                    if name not in _OF_ONE_START
                ),
                world_size=_count(derived, "world_size", 1),
                steps_per_epoch=length,
                is_complete=bool(length) and run.newest_step() >= length * epochs,
                kind=cast(Kind, content["kind"]),
                script_args=tuple(cast(Sequence[str], content["script_args"])),
            )
        except KeyError as error:
            raise UsageError(
                f"{run.run_json} wasn't written by this version of Paceline: it names no {error}"
            ) from error
        except ValueError as error:
            raise UsageError(
                f"{run.run_json} wasn't written by this version of Paceline: {error}"
            ) from error

    @classmethod
    def read_recipe(cls, run: RunDirectory) -> Self:
        """Read how a recipe's training began.

        Raises:
            UsageError: There is none, or a script has trained it.
        """
        past = cls.read(run)
        if past.kind == "script":
            raise UsageError(
                f"{run.path} was trained by the script {past.reference}, which alone knows its "
                "model and data: evaluate in the script (s.evaluate), or take the weights by "
                "paceline export"
            )
        return past

    def config(self) -> TrainConfig:
        """Build its options."""
        return TrainConfig.from_settings(self.settings)

    def changed(
        self,
        given: Mapping[str, OptionValue],
        allowed: Sequence[str],
        paths: Collection[str] = (),
        *,
        way_on: Callable[[str], str] = "To resume with them all the same: {}".format,
    ) -> tuple[dict[str, OptionValue], dict[str, OptionValue]]:
        """Put newly given options over the run's own.

        Args:
            given: Options and recipe arguments of the resuming command.
            allowed: Names that may differ although they change what is trained.
            paths: The recipe's arguments that are paths: data may have moved.
            way_on: Says how to resume with what may be allowed, from the options that allow it.

        Returns:
            Settings and recipe arguments to resume with.

        Raises:
            UsageError: Something would change that may not; all differences are shown.
        """
        held = frozenset() if self._may_differ(given) else WITH_SHARDS
        known = {**training_options(), **dict.fromkeys(given), **dict.fromkeys(self.arguments)}
        for name in allowed:
            if name not in known:
                text = unknown_name(
                    typed_name(name), map(typed_name, known), "option to change", _LISTED
                )
                raise UsageError(text)
        refused = []
        settings, arguments = without_other_methods(self.settings, given), dict(self.arguments)
        for name, value in given.items():
            place = settings if name in training_options() else arguments
            before = place.get(name)
            may = name in allowed and name not in FIXED and name not in held
            longer = name == "epochs" and self.is_complete and cast(int, value) > cast(int, before)
            free = name in FREE - held or name in paths or may or longer
            if self._effective(name, before) != self._effective(name, value) and not free:
                refused.append((name, before, value))
            place[name] = value
        if refused:
            raise UsageError(_refusal(refused, way_on))
        return settings, arguments

    def _may_differ(self, given: Mapping[str, OptionValue]) -> bool:
        """Tell whether results may differ in bits: without `--shards`, or if the user allows it."""
        allowed = {**self.settings, **given}.get("allow_different_hardware")
        return self.settings.get("shards") is None or bool(allowed)

    def _effective(self, name: str, value: OptionValue) -> OptionValue:
        """Give what an option comes to, so that a default and the same value given are one."""
        if value is None and self.settings.get("shards") is not None:
            return {"threads": 1, "fused": False}.get(name)
        return value

    def check_epochs(self, epochs: int, step: int) -> None:
        """Refuse a number of epochs that the training has passed already.

        Args:
            epochs: How many the training is to have now.
            step: The newest snapshot's step.

        Raises:
            UsageError: More epochs have been begun than are asked for.
        """
        if not self.steps_per_epoch:
            return
        done, rest = divmod(step, self.steps_per_epoch)
        begun = done + (rest > 0)
        if begun > epochs:
            more = f", {rest} steps into the next" if rest else ""
            raise UsageError(
                f"--epochs is {epochs}, but epoch {done} is trained already{more}, and "
                f"that can't be undone. Give at least {begun}"
            )


def _count(derived: Mapping[str, OptionValue], name: str, least: int) -> int:
    """Read a number of things; the least where there is no value."""
    value = derived[name] if least else derived.get(name) or least
    if type(value) is not int or value < least:
        raise ValueError(f"{name} is {value!r}; it should be a whole number of at least {least}")
    return value


def _tuples(values: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
    """Turn the lists that JSON made of tuples back into tuples."""
    return {n: tuple(v) if isinstance(v, list) else v for n, v in values.items()}


def _refusal(
    refused: Sequence[tuple[str, OptionValue, OptionValue]], way_on: Callable[[str], str]
) -> str:
    lines = [f"  {flag(name)}: the run has {old}, you give {new}" for name, old, new in refused]
    fixed = [name for name, _, _ in refused if name in FIXED]
    exact = [name for name, _, _ in refused if name in WITH_SHARDS]
    other = [name for name, _, _ in refused if name not in {*FIXED, *exact}]
    text = "these settings differ from the run's:\n" + "\n".join(lines)
    # What can be done: nothing, leave it as it was, or allow it.
    for name in fixed:
        text += f"\n{flag(name)} can't change within a training, {FIXED[name]}: start a new one"
    if exact:
        text += (
            f"\nWith --shards the bits depend on {' and '.join(map(flag, exact))}: leave it as "
            "it is, or add --allow-different-hardware to resume with other bits"
        )
    if other:
        words = " ".join(f"--allow-change {typed_name(name)}" for name in other)
        text += f"\n{way_on(words)}"
    return text
