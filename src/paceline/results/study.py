"""A study of how a training scales, as `study.json` holds it: one schema, written and read here.

Beside it a study's directory has `measured/NAME.json`, what each of its trainings came to.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Literal, Self, final

from paceline.files import read_json_object, write_json, writing
from paceline.options.fields import read_dataclass
from paceline.results.json_object import (
    JsonObject,
    entries,
    number,
    read_object,
    section,
    text,
    texts,
    whole,
)
from paceline.results.profile import EpochCosts, Spread, StepParts, StepProfile

FORMAT = 1
STUDY_JSON = "study.json"
Mode = Literal["weak", "strong"]

_MAX_VALUE = 1e15
"""A figure beyond it isn't one that was measured, and no picture could hold it."""


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """A training at the end of an epoch."""

    time_s: float | None
    samples: int | None
    train_loss: float | None
    val_loss: float | None
    val_accuracy: float | None


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Result of a whole training on one number of workers."""

    run_dir: str
    epochs: int | None
    stopped_because: str
    train_time_s: float | None
    best_val_loss: float | None
    best_val_accuracy: float | None
    test_loss: float | None
    test_accuracy: float | None
    curve: tuple[CurvePoint, ...]


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """One measurement of a size."""

    run_dir: str
    images_per_s: float | None = None
    step_s: float | None = None
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class SizeResult:
    """Result of one number of workers with one method; None where it wasn't measured.

    It has a field for each key of an entry of `sizes`, which are these many.
    """

    workers: int
    nodes: int | None
    method: str
    method_options: Mapping[str, object] = field(default_factory=dict)
    global_batch: int | None = None
    lr: float | None = None
    steps_per_epoch: int | None = None
    """0 where the length of an epoch isn't known."""
    images_per_s: Spread | None = None
    """Of all workers. Spreads are over the repeats: their median, the least and the most."""
    step_s: Spread | None = None
    efficiency: Spread | None = None
    """Images a second, by workers times those of the best run of one worker; a fraction."""
    parts: StepParts | None = None
    """As shared out in the repeat in the middle; together they are the median step."""
    epoch_s: float | None = None
    """Its steps, evaluation, snapshot and the loader's start."""
    fixed: EpochCosts = field(default_factory=EpochCosts)
    wire_bytes_per_step: float | None = None
    repeats: tuple[Repeat, ...] = ()
    problem: str | None = None
    trained: Trained | None = None

    @property
    def fixed_share(self) -> float | None:
        """The share of an epoch that its fixed costs take; None where it isn't known."""
        total_s = self.fixed.total_s
        if total_s is None or self.step_s is None or not self.steps_per_epoch:
            return None
        whole_s = total_s + self.steps_per_epoch * self.step_s.median
        return total_s / whole_s if whole_s > 0 else None


@dataclass(frozen=True, kw_only=True)
class PredictedSize:
    """Predicted result of one number of workers."""

    workers: int
    nodes: int | None
    efficiency: float
    low: float
    """The band's lower end, a fraction as the efficiency."""
    high: float
    images_per_s: float | None
    step_s: float | None


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predictions by a model that was fitted to the measured sizes."""

    text: tuple[str, ...]
    link: JsonObject
    methods: Mapping[str, tuple[PredictedSize, ...]]
    """Each with its sizes in growing order."""


@final
@dataclass(frozen=True, kw_only=True)
class Study:
    """A study as it stands. It has a field for each key of `study.json`, which are these many."""

    recipe: str
    command: tuple[str, ...]
    started_at: str
    """ISO 8601, UTC."""
    paceline: str
    hosts: tuple[str, ...]
    mode: Mode
    repeats: int
    """How often each size is to be measured; 0 where a damaged file doesn't say."""
    seconds: float
    """Of each measurement; 0 where a damaged file doesn't say."""
    versions: Mapping[str, str] = field(default_factory=dict)
    device: str = ""
    cores: int | None = None
    """Of the smallest host."""
    baseline_images_per_s: float | None = None
    """Of the best run of one worker, with any method."""
    not_reliable: str = ""
    """Why no conclusion is drawn from these measurements, in words; empty where one can be."""
    notes: tuple[str, ...] = ()
    sizes: tuple[SizeResult, ...] = ()
    """By workers, then in the order of the methods."""
    prediction: JsonObject | None = None
    """As `paceline predict --json` prints it; `predicted` reads it."""
    asked: Mapping[str, object] = field(default_factory=dict)
    """What settles the measurements: a study is resumed only where it is the same."""

    @property
    def measured(self) -> tuple[SizeResult, ...]:
        """The sizes whose throughput is known."""
        return tuple(size for size in self.sizes if size.images_per_s is not None)

    @property
    def predicted(self) -> Prediction | None:
        """What is expected of sizes that weren't measured; None where nothing is."""
        return _prediction(self.prediction or {})

    def to_json(self) -> dict[str, object]:
        """Convert it to JSON types."""
        return {"format": FORMAT, "kind": "scale", **asdict(self)}

    @classmethod
    def from_json(cls, record: JsonObject) -> Self:
        """Take what is right of a study's JSON, whole or not; the rest counts as not measured."""
        return cls(
            recipe=text(record, "recipe"),
            command=texts(record, "command"),
            started_at=text(record, "started_at"),
            paceline=text(record, "paceline"),
            hosts=texts(record, "hosts"),
            mode="strong" if text(record, "mode") == "strong" else "weak",
            repeats=_positive(record, "repeats") or 0,
            seconds=_above_zero(record, "seconds") or 0.0,
            versions={name: str(value) for name, value in section(record, "versions").items()},
            device=text(record, "device"),
            cores=_positive(record, "cores"),
            baseline_images_per_s=_above_zero(record, "baseline_images_per_s"),
            not_reliable=text(record, "not_reliable"),
            notes=texts(record, "notes"),
            sizes=_sizes(record),
            prediction=section(record, "prediction") or None,
            asked=section(record, "asked"),
        )


@final
@dataclass(frozen=True, kw_only=True)
class Measured:
    """Result of one training of a study; without a profile if it failed."""

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

    def write(self, path: Path) -> None:
        """Keep it as a file.

        Raises:
            UsageError: The directory can't be written.
            StorageError: The disk is full.
        """
        profile = None if self.profile is None else json.loads(self.profile.to_json())
        with writing(path):
            write_json(path, {**asdict(self), "profile": profile})

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Read what `write` wrote; None where there is nothing, or nothing whole."""
        try:
            content = read_json_object(path)
            profile = content.pop("profile")
            step_profile = None if profile is None else StepProfile.from_json(json.dumps(profile))
            return replace(read_dataclass(cls, content, strict=True), profile=step_profile)
        except (OSError, ValueError, KeyError):
            return None


def read_study(directory: Path) -> tuple[Study, tuple[str, ...]]:
    """Read what there is of a study, for its report. Blocks for one file.

    Nothing here fails because something is missing, torn or not what it should be.

    Returns:
        The study, and a sentence for each problem with its file.
    """
    problems: list[str] = []
    record = read_object(directory / STUDY_JSON, problems, expected=True)
    written = whole(record, "format")
    if record and written != FORMAT:
        problems.append(f"{STUDY_JSON} has format {written}; this Paceline reads {FORMAT}")
    return Study.from_json(record), tuple(problems)


def require_study(directory: Path, *, sizes: bool = False, settings: bool = False) -> Study:
    """Read a study that has to be one.

    Args:
        sizes: Whether what it says of each size has to be right as well.
        settings: Whether it has to say what was asked for.

    Raises:
        OSError: The file can't be read.
        ValueError: It isn't a study; the message is a sentence without the path.
    """
    record = read_json_object(directory / STUDY_JSON)
    if record.get("kind") != "scale":
        raise ValueError("it holds no study of scaling")
    if record.get("format") != FORMAT:
        raise ValueError(f"it has format {record.get('format')}, and this Paceline reads {FORMAT}")
    if sizes:
        _check_sizes(record.get("sizes"))
    if settings and not isinstance(record.get("asked"), dict):
        raise ValueError("it doesn't say what was asked for")
    return Study.from_json(record)


def _check_sizes(sizes: object) -> None:
    """Check the entries of `sizes`; what a later version adds to them isn't looked at.

    Raises:
        ValueError: Something isn't what it should be.
    """
    if not isinstance(sizes, list):
        raise ValueError("it names no list of sizes")
    for size in sizes:
        checked = read_dataclass(SizeResult, size)
        if checked.workers < 1 or (checked.nodes or 1) < 1:
            raise ValueError("a size has less than one worker or node")


def _sizes(record: JsonObject) -> tuple[SizeResult, ...]:
    sizes = [_size(entry) for entry in entries(record, "sizes") if _positive(entry, "workers")]
    methods = list(dict.fromkeys(size.method for size in sizes))
    return tuple(sorted(sizes, key=lambda size: (size.workers, methods.index(size.method))))


def _size(entry: JsonObject) -> SizeResult:
    trained, fixed = section(entry, "trained"), section(entry, "fixed")
    steps = _not_negative(entry, "steps_per_epoch")
    return SizeResult(
        workers=_positive(entry, "workers") or 1,
        nodes=_positive(entry, "nodes"),
        method=text(entry, "method") or "allreduce",
        method_options=section(entry, "method_options"),
        global_batch=_positive(entry, "global_batch"),
        lr=_figure(entry, "lr"),
        steps_per_epoch=None if steps is None else int(steps),
        images_per_s=_spread(entry, "images_per_s"),
        step_s=_spread(entry, "step_s"),
        efficiency=_spread(entry, "efficiency"),
        parts=_parts(section(entry, "parts")),
        epoch_s=_above_zero(entry, "epoch_s"),
        fixed=EpochCosts(**{f.name: _not_negative(fixed, f.name) for f in fields(EpochCosts)}),
        wire_bytes_per_step=_not_negative(entry, "wire_bytes_per_step"),
        repeats=tuple(
            Repeat(
                run_dir=text(repeat, "run_dir"),
                images_per_s=_above_zero(repeat, "images_per_s"),
                step_s=_above_zero(repeat, "step_s"),
                problem=text(repeat, "problem") or None,
            )
            for repeat in entries(entry, "repeats")
        ),
        problem=text(entry, "problem") or None,
        trained=_trained(trained) if trained else None,
    )


def _spread(entry: JsonObject, name: str) -> Spread | None:
    """Read a figure with its spread, or one without; None where it isn't a positive number."""
    spread = section(entry, name)
    median = _above_zero(spread, "median") if spread else _above_zero(entry, name)
    if median is None:
        return None
    low, high = _above_zero(spread, "low"), _above_zero(spread, "high")
    return Spread(
        median=median,
        low=median if low is None else min(low, median),
        high=median if high is None else max(high, median),
    )


def _parts(entry: JsonObject) -> StepParts | None:
    known = {f.name: _figure(entry, f.name) for f in fields(StepParts)}
    if all(value is None for value in known.values()):
        return None
    return StepParts(**{name: max(value or 0.0, 0.0) for name, value in known.items()})


def _trained(entry: JsonObject) -> Trained:
    return Trained(
        run_dir=text(entry, "run_dir"),
        epochs=whole(entry, "epochs"),
        stopped_because=text(entry, "stopped_because"),
        train_time_s=_above_zero(entry, "train_time_s"),
        best_val_loss=_figure(entry, "best_val_loss"),
        best_val_accuracy=_figure(entry, "best_val_accuracy"),
        test_loss=_figure(entry, "test_loss"),
        test_accuracy=_figure(entry, "test_accuracy"),
        curve=tuple(_curve_point(point) for point in entries(entry, "curve")),
    )


def _curve_point(entry: JsonObject) -> CurvePoint:
    samples = _not_negative(entry, "samples")
    return CurvePoint(
        time_s=_not_negative(entry, "time_s"),
        samples=None if samples is None else int(samples),
        train_loss=_figure(entry, "train_loss"),
        val_loss=_figure(entry, "val_loss"),
        val_accuracy=_figure(entry, "val_accuracy"),
    )


def _prediction(entry: JsonObject) -> Prediction | None:
    methods: dict[str, tuple[PredictedSize, ...]] = {}
    for method in entries(entry, "methods"):
        predicted = map(_predicted_size, entries(method, "sizes"))
        sizes = sorted((size for size in predicted if size), key=lambda size: size.workers)
        name = text(method, "method") or "allreduce"
        if name in methods:  # The same with other options.
            name = text(method, "label") or name
        if sizes:
            methods[name] = tuple(sizes)
    sentences = texts(entry, "text")
    if not methods and not sentences:
        return None
    return Prediction(text=sentences, link=section(entry, "link"), methods=methods)


def _predicted_size(entry: JsonObject) -> PredictedSize | None:
    workers, efficiency = _positive(entry, "workers"), _above_zero(entry, "efficiency")
    if workers is None or efficiency is None:
        return None
    low, high = _not_negative(entry, "low"), _not_negative(entry, "high")
    return PredictedSize(
        workers=workers,
        nodes=_positive(entry, "nodes"),
        efficiency=efficiency,
        low=efficiency if low is None else min(low, efficiency),
        high=efficiency if high is None else max(high, efficiency),
        images_per_s=_above_zero(entry, "images_per_s"),
        step_s=_above_zero(entry, "step_s"),
    )


def _positive(entry: JsonObject, name: str) -> int | None:
    value = _above_zero(entry, name)
    return None if value is None else int(value) or None


def _above_zero(entry: JsonObject, name: str) -> float | None:
    value = _figure(entry, name)
    return value if value is not None and value > 0 else None


def _not_negative(entry: JsonObject, name: str) -> float | None:
    value = _figure(entry, name)
    return value if value is not None and value >= 0 else None


def _figure(entry: JsonObject, name: str) -> float | None:
    value = number(entry, name)
    return value if value is not None and abs(value) <= _MAX_VALUE else None
