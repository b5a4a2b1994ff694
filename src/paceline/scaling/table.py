"""A study in words: tables of plain text that fit 100 columns, and rows for a spreadsheet. Pure."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields

from paceline.options.durations import format_clock, format_duration
from paceline.options.figures import (
    plural,
    show_bytes,
    show_loss,
    show_milliseconds,
    show_percent,
    show_rate,
    show_whole_percent,
)
from paceline.options.text import aligned, line_width, wrapped
from paceline.results.json_object import text
from paceline.results.profile import Spread, StepParts
from paceline.results.study import SizeResult, Study
from paceline.scaling.options import PLAIN

WIDTH = 100
_REASONS = {"epochs": "all epochs", "time": "time budget"}


def as_text(study: Study) -> str:
    """Write a study for people."""
    measured = [size for size in study.sizes if size.images_per_s is not None]
    parts = [_heading(study)]
    parts.append(_filled(study.not_reliable))
    if measured:
        parts += [_main_table(study), _step_table(study, measured), _epoch_table(study, measured)]
    if any(size.trained for size in study.sizes):
        parts.append(_trained_table(study))
    parts += [] if study.not_reliable else [_conclusions(measured)]
    parts += [_prediction(study), _notes(study)]
    return "\n\n".join(part for part in parts if part)


def as_csv(study: Study) -> str:
    """Write a study as a table for other programs: a row for each size and method."""
    rows = [_csv_row(size) for size in study.sizes]
    out = io.StringIO()
    if rows:
        writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return out.getvalue()


def _heading(study: Study) -> str:
    batch = "the same batch for each worker" if study.mode == "weak" else "the same global batch"
    times = "once" if study.repeats == 1 else f"{study.repeats} times"
    where = f" on {study.device}" if study.device else ""
    text = (
        f"Scaling of {study.recipe}{where}: {study.mode}, {batch}; each size measured {times}, "
        f"{format_duration(study.seconds)} each"
    )
    return _filled(text)


def _main_table(study: Study) -> str:
    """Write the study's own table."""
    rows = [
        (
            *_size_cells(study, size),
            _count(size.global_batch),
            "-" if size.lr is None else show_rate(size.lr),
            _count(size.steps_per_epoch or None),
            _middle(size.images_per_s, "{:,.0f}"),
            _middle(size.efficiency, "{:.2f}"),
            _range(size),
            str(_measured_times(size)),
            "-" if size.epoch_s is None else format_clock(size.epoch_s),
        )
        for size in study.sizes
    ]
    head = ("batch", "lr", "steps", "images/s", "efficiency", "spread", "n", "epoch")
    return _table((*_size_head(study), *head), rows)


def _step_table(study: Study, measured: Sequence[SizeResult]) -> str:
    names = [field.name for field in fields(StepParts)]
    rows = []
    for size in measured:
        parts = [getattr(size.parts, name) if size.parts else None for name in names]
        step_s = size.step_s.median if size.step_s else None
        rows.append((*_size_cells(study, size)[::2], *map(_ms, (step_s, *parts))))
    heading = "Where the milliseconds of a step go"
    words = (
        "exposed: communication that isn't hidden behind the backward pass. waiting: for the "
        "slowest worker."
    )
    head = (*_size_head(study)[::2], "step", *names)
    return "\n".join([heading, _table(head, rows), words])


def _epoch_table(study: Study, measured: Sequence[SizeResult]) -> str:
    """Write what an epoch costs besides its steps, and what goes over the wire."""
    rows = []
    for size in measured:
        fixed = size.fixed
        costs = [fixed.evaluation_s, fixed.snapshot_s, fixed.loader_start_s]
        shown = ("-" if cost is None else _seconds(cost) for cost in costs)
        sent = size.wire_bytes_per_step
        share = "-"
        if size.epoch_s:
            share = show_whole_percent((fixed.total_s or 0) / size.epoch_s)
        rows.append(
            (
                *_size_cells(study, size)[::2],
                *shown,
                share,
                "-" if sent is None else show_bytes(sent),
            )
        )
    heading = "The fixed cost of an epoch, and what a worker sends in a step"
    head = ("evaluation", "snapshot", "loader start", "of the epoch", "sent")
    return "\n".join([heading, _table((*_size_head(study)[::2], *head), rows)])


def _trained_table(study: Study) -> str:
    rows = []
    for size in study.sizes:
        if (trained := size.trained) is None:
            continue
        reason = _REASONS.get(trained.stopped_because, trained.stopped_because)
        rows.append(
            (
                *_size_cells(study, size)[::2],
                str(trained.epochs),
                format_clock(trained.train_time_s or 0.0),
                reason,
                _loss(trained.best_val_loss),
                _percent(trained.best_val_accuracy),
                _loss(trained.test_loss),
                _percent(trained.test_accuracy),
            )
        )
    head = ("epochs", "time", "until", "val loss", "val top-1", "test loss", "test top-1")
    heading = "Trained (validation: the best; test: of the best model)"
    return "\n".join([heading, _table((*_size_head(study)[::2], *head), rows)])


def _conclusions(measured: Sequence[SizeResult]) -> str:
    """Say of the largest size of each method what it comes to."""
    largest = {size.method: size for size in sorted(measured, key=lambda size: size.workers)}
    lines = [_conclusion(size) for size in largest.values() if size.workers > 1 and size.efficiency]
    return "\n".join(_filled(line) for line in lines)


def _conclusion(size: SizeResult) -> str:
    assert size.efficiency is not None
    times = size.efficiency.median * size.workers
    text = f"{size.workers} workers with {size.method}: {times:.1f} times the best images/s of one"
    if size.parts is None or size.step_s is None or size.step_s.median <= 0:
        return f"{text}."
    whole_s = sum(asdict(size.parts).values()) or size.step_s.median
    shares = {
        "communication that isn't hidden": size.parts.exposed / whole_s,
        "waiting for the slowest": size.parts.waiting / whole_s,
        "waiting for data": size.parts.data / whole_s,
    }
    parts = [
        f"{show_whole_percent(share)} is {what}" for what, share in shares.items() if share >= 0.01
    ]
    return f"{text}; of a step {', '.join(parts)}." if parts else f"{text}."


def _prediction(study: Study) -> str:
    """Say what is to be expected of more hosts, and of which network."""
    predicted = study.predicted
    if predicted is None or not predicted.text:
        return ""
    source = text(predicted.link, "source")
    heading = f"Predicted for more hosts (network: {source})" if source else "Predicted"
    return "\n".join(_filled(line) for line in (heading, *predicted.text))


def _notes(study: Study) -> str:
    """Say what failed, and what else a reader should know."""
    lines = [
        f"{plural(size.workers, 'worker')} with {size.method} couldn't be measured: {size.problem}"
        for size in study.sizes
        if size.problem
    ]
    lines += _missing(study)
    lines += study.notes
    return "\n".join(_filled(f"- {line}", "  ") for line in lines)


def _missing(study: Study) -> list[str]:
    """Say which sizes have no measurement yet."""
    missing = [s for s in study.sizes if s.images_per_s is None and not s.problem]
    if not missing:
        return []
    names = ", ".join(f"{plural(s.workers, 'worker')} with {s.method}" for s in missing)
    return [f"Not measured yet: {names}"]


def _size_head(study: Study) -> tuple[str, ...]:
    """Name the columns that tell sizes apart: every second one is enough for a further table."""
    return ("workers", "nodes", "method") if _has_methods(study) else ("workers", "nodes")


def _size_cells(study: Study, size: SizeResult) -> tuple[str, ...]:
    words = (str(size.workers), str(size.nodes), size.method)
    return words if _has_methods(study) else words[:2]


def _has_methods(study: Study) -> bool:
    return any(size.method != PLAIN for size in study.sizes)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out columns: words to the left, figures to the right."""
    left = {place for place, name in enumerate(head) if name in ("method", "until")}
    return "\n".join(aligned([head, *rows], left))


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _middle(spread: Spread | None, how: str) -> str:
    return "-" if spread is None else how.format(spread.median)


def _range(size: SizeResult) -> str:
    """Write the least and the most of the repeats; a single one has neither."""
    spread = size.efficiency
    if spread is None or _measured_times(size) < 2:
        return "-"
    return f"{spread.low:.2f}-{spread.high:.2f}"


def _measured_times(size: SizeResult) -> int:
    return sum(repeat.problem is None for repeat in size.repeats)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else show_milliseconds(seconds)


def _seconds(value: float) -> str:
    return format_clock(value) if value >= 1 else f"{1000 * value:.0f} ms"


def _loss(value: float | None) -> str:
    return "-" if value is None else show_loss(value)


def _percent(value: float | None) -> str:
    return "-" if value is None else show_percent(value)


def _csv_row(size: SizeResult) -> Mapping[str, object]:
    """Flatten a size: a spread becomes three columns, parts and trained figures one each."""
    row: dict[str, object] = {
        name: getattr(size, name)
        for name in ("workers", "nodes", "method", "global_batch", "lr", "steps_per_epoch")
    }
    for name in ("images_per_s", "step_s", "efficiency"):
        spread: Spread | None = getattr(size, name)
        row[name] = spread.median if spread else None
        row[f"{name}_low"] = spread.low if spread else None
        row[f"{name}_high"] = spread.high if spread else None
    for field in fields(StepParts):
        row[f"{field.name}_s"] = getattr(size.parts, field.name) if size.parts else None
    row["epoch_s"] = size.epoch_s
    row |= asdict(size.fixed)
    row["wire_bytes_per_step"] = size.wire_bytes_per_step
    for name in _OF_TRAINED:
        row[name] = getattr(size.trained, name) if size.trained else None
    return row | {"problem": size.problem}


_OF_TRAINED = (
    "epochs",
    "stopped_because",
    "train_time_s",
    "best_val_loss",
    "best_val_accuracy",
    "test_loss",
    "test_accuracy",
)


def _filled(text: str, indent: str = "") -> str:
    return "\n".join(wrapped(text, line_width(WIDTH), indent))
