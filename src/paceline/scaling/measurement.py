"""What one training of a study showed, read from its run directory and kept as a file of its own.

What the study says follows from these records alone, so that it can go on after an interruption.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from paceline.errors import DataError, ExitCode, UsageError
from paceline.files import read_json_object, read_plain, write_json
from paceline.gradient_sync.options import SyncOptions
from paceline.metrics.table import TABLE_MAX_BYTES, parse_rows
from paceline.options.fields import check_types
from paceline.options.quantities import parse_count
from paceline.results.profile import StepProfile
from paceline.results.run_directory import RunDirectory
from paceline.scaling.plan import own_options

_NO_PROFILE = (
    "it left no profile of its steps. A script has to train by paceline.session(), and for longer "
    "than a few steps"
)
_OTHER_METHOD = (
    "the training combined its gradients by {own}, and {wanted} was to be measured: say --methods "
    "{own}, or leave the method out of the script"
)


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """A training at the end of an epoch."""

    time_s: float
    samples: int
    train_loss: float | None
    val_loss: float | None
    val_accuracy: float | None


@dataclass(frozen=True, kw_only=True)
class Trained:
    """How a whole training of a size ended."""

    run_dir: str
    epochs: int
    stopped_because: str
    train_time_s: float
    best_val_loss: float | None
    best_val_accuracy: float | None
    test_loss: float | None
    test_accuracy: float | None
    curve: tuple[CurvePoint, ...]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a training came to; without a profile where it failed."""

    run_dir: str
    """Relative to the study's directory."""
    exit_code: int
    problem: str | None = None
    wall_s: float = 0.0
    """From the command's start to its end."""
    profile: StepProfile | None = None
    images_per_s: float | None = None
    """Of all workers."""
    step_s: float | None = None
    lr: float | None = None
    threads: int | None = None
    """Of each worker."""
    cores: int | None = None
    """Of the smallest host."""
    script_batch: int | None = None
    """The global batch where the training settles it itself."""
    versions: Mapping[str, str] | None = None
    method_options: Mapping[str, object] | None = None
    """Of the way of combining gradients, as the training settled them."""
    sync_chosen: str | None = None
    """What `auto` came to."""

    def write(self, path: Path) -> None:
        """Keep it as a file."""
        profile = None if self.profile is None else json.loads(self.profile.to_json())
        write_json(path, {**asdict(self), "profile": profile})

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Read what `write` wrote; None where there is nothing, or nothing whole."""
        try:
            told = check_types(cls, read_json_object(path))
            profile = told.pop("profile")
            whole = None if profile is None else StepProfile.from_json(json.dumps(profile))
            return cls(**told, profile=whole)
        except (OSError, ValueError, KeyError):
            return None


def read_measured(run: RunDirectory, name: str, wall_s: float, method: str) -> Measured:
    """Read a measurement that has ended well.

    Args:
        run: Its run directory.
        name: As the study names it.
        wall_s: How long its command took.
        method: The way of combining gradients that was to be measured.
    """
    try:
        profile = StepProfile.read(run.profile_json)
        told = run.read_run()
    except (DataError, UsageError) as error:
        missing = not run.profile_json.exists()
        problem = _NO_PROFILE if missing else str(error)
        return Measured(run_dir=name, exit_code=ExitCode.JOB, problem=problem, wall_s=wall_s)
    if profile.sync != method:
        problem = _OTHER_METHOD.format(own=profile.sync, wanted=method)
        return Measured(run_dir=name, exit_code=ExitCode.USAGE, problem=problem, wall_s=wall_s)
    derived, settings = _section(told, "derived"), _section(told, "settings")
    given = told.get("given")
    own = "global_batch" not in (given if isinstance(given, list) else ())
    batch = _number(settings.get("global_batch")) if told.get("kind") == "script" and own else None
    hosts = told.get("hosts")
    cores = [_number(h.get("cores")) for h in hosts] if isinstance(hosts, list) else []
    threads = _number(derived.get("threads"))
    return Measured(
        run_dir=name,
        exit_code=ExitCode.DONE,
        wall_s=wall_s,
        profile=profile,
        images_per_s=profile.images_per_s,
        step_s=profile.step_s.median,
        lr=_number(derived.get("lr")),
        threads=None if threads is None else int(threads),
        cores=min((int(c) for c in cores if c is not None), default=None),
        script_batch=None if batch is None else int(batch),
        versions={str(k): str(v) for k, v in _section(told, "versions").items()},
        method_options=_method_options(method, settings),
        sync_chosen=_chosen(run),
    )


def _method_options(method: str, settings: Mapping[str, object]) -> dict[str, object]:
    """Take a method's own options; what makes a measurement short is none."""
    names = [name for name in own_options(method) if name != "sync_warmup_steps"]
    told = {name: settings[name] for name in names if name in settings}
    every = told.get("sync_every")
    if "sync_delay" in told and told["sync_delay"] is None and isinstance(every, int):
        told["sync_delay"] = SyncOptions(sync_every=every).delay
    return told


def _chosen(run: RunDirectory) -> str | None:
    try:
        chosen = read_json_object(run.summary_json).get("sync_chosen")
    except (OSError, ValueError):
        return None
    return chosen if isinstance(chosen, str) else None


def read_trained(run: RunDirectory, name: str) -> Trained:
    """Read a whole training.

    Args:
        run: Its run directory.
        name: As the study names it.

    Raises:
        DataError: It left no summary.
    """
    try:
        summary = read_json_object(run.summary_json)
        derived = _section(run.read_run(), "derived")
    except (OSError, ValueError, UsageError) as error:
        raise DataError(f"{run.path} has no summary of the training: {error}") from error
    return Trained(
        run_dir=name,
        epochs=int(_number(summary.get("epochs")) or 0),
        stopped_because=str(summary.get("stopped_because")),
        train_time_s=_number(summary.get("train_time_s")) or 0.0,
        best_val_loss=_number(summary.get("best_val_loss")),
        best_val_accuracy=_number(summary.get("best_val_accuracy")),
        test_loss=_number(summary.get("test_loss")),
        test_accuracy=_number(summary.get("test_accuracy")),
        curve=tuple(_point(row, derived) for row in _rows(run.metrics_csv)),
    )


def _point(row: Mapping[str, str], derived: Mapping[str, object]) -> CurvePoint:
    step, batch = int(row["step"]), int(_number(derived.get("global_batch")) or 0)
    steps = int(_number(derived.get("steps_per_epoch")) or 0)
    samples = step * batch
    if steps:  # an epoch's last batch may be short
        all_samples = int(_number(derived.get("train_samples")) or 0)
        samples = step // steps * all_samples + step % steps * batch
    return CurvePoint(
        time_s=_number(row.get("time_s")) or 0.0,
        samples=samples,
        train_loss=_number(row.get("train_loss")),
        val_loss=_number(row.get("val_loss")),
        val_accuracy=_number(row.get("val_accuracy")),
    )


def _rows(path: Path) -> list[Mapping[str, str]]:
    try:
        content = read_plain(path, TABLE_MAX_BYTES).decode(errors="replace")
        return [row for row in parse_rows(content) if parse_count(str(row.get("step"))) is not None]
    except (OSError, ValueError):
        return []


def _section(content: Mapping[str, object], name: str) -> Mapping[str, object]:
    part = content.get(name)
    return part if isinstance(part, dict) else {}


def _number(value: object) -> float | None:
    """Read a finite number; None for anything else."""
    try:
        number = float(str(value))
    except ValueError:
        return None
    return number if abs(number) < float("inf") else None
