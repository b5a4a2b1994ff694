"""Reads `study.json`, whole or not, into one value that the page is made from.

Nothing here fails because something is missing, torn or not what it should be; the page says so.
"""

from dataclasses import fields
from pathlib import Path

from paceline.report.load_run import JsonObject, entries, number, read_object, section, text, whole
from paceline.report.scaling.model import (
    CurvePoint,
    Fixed,
    PredictedSize,
    Prediction,
    Repeat,
    Size,
    Study,
    Trained,
)
from paceline.results.profile import Spread, StepParts

FORMAT = 1
STUDY_JSON = "study.json"

_MOST = 1e15
"""A figure beyond it isn't one that was measured, and no picture could hold it."""


def read_study(study_dir: Path) -> Study:
    """Read what there is of a study; blocks for one file only."""
    problems: list[str] = []
    record = read_object(study_dir / STUDY_JSON, problems, expected=True)
    written = whole(record, "format")
    if record and written != FORMAT:
        problems.append(f"{STUDY_JSON} has format {written}; this Paceline reads {FORMAT}")
    return Study(
        path=study_dir,
        record=record,
        mode="strong" if text(record, "mode") == "strong" else "weak",
        repeats=_positive(record, "repeats"),
        baseline_images_per_s=_above_zero(record, "baseline_images_per_s"),
        not_reliable=text(record, "not_reliable"),
        notes=_words(record, "notes"),
        sizes=_read_sizes(record),
        prediction=_read_prediction(section(record, "prediction")),
        problems=tuple(problems),
    )


def _read_sizes(record: JsonObject) -> tuple[Size, ...]:
    found = [_read_size(entry) for entry in entries(record, "sizes") if _positive(entry, "workers")]
    methods = list(dict.fromkeys(size.method for size in found))
    return tuple(sorted(found, key=lambda size: (size.workers, methods.index(size.method))))


def _read_size(entry: JsonObject) -> Size:
    trained = section(entry, "trained")
    return Size(
        workers=_positive(entry, "workers") or 1,
        nodes=_positive(entry, "nodes"),
        method=text(entry, "method") or "allreduce",
        options=section(entry, "method_options"),
        global_batch=_positive(entry, "global_batch"),
        lr=_figure(entry, "lr"),
        steps_per_epoch=_positive(entry, "steps_per_epoch"),
        images_per_s=_read_spread(entry, "images_per_s"),
        step_s=_read_spread(entry, "step_s"),
        efficiency=_read_spread(entry, "efficiency"),
        parts=_read_parts(section(entry, "parts")),
        epoch_s=_above_zero(entry, "epoch_s"),
        fixed=_read_fixed(section(entry, "fixed")),
        wire_bytes_per_step=_not_negative(entry, "wire_bytes_per_step"),
        repeats=tuple(_read_repeat(repeat) for repeat in entries(entry, "repeats")),
        problem=text(entry, "problem"),
        trained=_read_trained(trained) if trained else None,
    )


def _read_spread(entry: JsonObject, name: str) -> Spread | None:
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


def _read_parts(entry: JsonObject) -> StepParts | None:
    names = [field.name for field in fields(StepParts)]
    known = {name: _figure(entry, name) for name in names}
    if all(value is None for value in known.values()):
        return None
    return StepParts(**{name: max(value or 0.0, 0.0) for name, value in known.items()})


def _read_fixed(entry: JsonObject) -> Fixed:
    return Fixed(
        evaluation_s=_not_negative(entry, "evaluation_s"),
        snapshot_s=_not_negative(entry, "snapshot_s"),
        loader_start_s=_not_negative(entry, "loader_start_s"),
        averaging_s=_not_negative(entry, "averaging_s"),
    )


def _read_repeat(entry: JsonObject) -> Repeat:
    return Repeat(
        run_dir=text(entry, "run_dir"),
        images_per_s=_above_zero(entry, "images_per_s"),
        step_s=_above_zero(entry, "step_s"),
        problem=text(entry, "problem"),
    )


def _read_trained(entry: JsonObject) -> Trained:
    return Trained(
        epochs=whole(entry, "epochs"),
        stopped_because=text(entry, "stopped_because"),
        train_time_s=_above_zero(entry, "train_time_s"),
        best_val_loss=_figure(entry, "best_val_loss"),
        best_val_accuracy=_figure(entry, "best_val_accuracy"),
        test_loss=_figure(entry, "test_loss"),
        test_accuracy=_figure(entry, "test_accuracy"),
        curve=tuple(_read_point(point) for point in entries(entry, "curve")),
    )


def _read_point(entry: JsonObject) -> CurvePoint:
    return CurvePoint(
        time_s=_not_negative(entry, "time_s"),
        samples=_not_negative(entry, "samples"),
        train_loss=_figure(entry, "train_loss"),
        val_loss=_figure(entry, "val_loss"),
    )


def _read_prediction(entry: JsonObject) -> Prediction | None:
    methods: dict[str, tuple[PredictedSize, ...]] = {}
    for method in entries(entry, "methods"):
        read = (_read_predicted(size) for size in entries(method, "sizes"))
        sizes = sorted((size for size in read if size), key=lambda size: size.workers)
        name = text(method, "method") or "allreduce"
        if name in methods:  # The same with other options.
            name = text(method, "label") or name
        if sizes:
            methods[name] = tuple(sizes)
    told = _words(entry, "text")
    if not methods and not told:
        return None
    return Prediction(text=told, link=section(entry, "link"), methods=methods)


def _read_predicted(entry: JsonObject) -> PredictedSize | None:
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


def _words(entry: JsonObject, name: str) -> tuple[str, ...]:
    value = entry.get(name)
    return tuple(str(item) for item in value) if isinstance(value, list) else ()


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
    return value if value is not None and abs(value) <= _MOST else None
