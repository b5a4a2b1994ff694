"""The page's figures and tables of a study as plain text cells; no HTML here."""

from collections.abc import Callable
from dataclasses import asdict, dataclass

from paceline.options import figures
from paceline.options.durations import format_clock
from paceline.options.figures import plural
from paceline.report.scaling.captions import FIXED_NAMES, PART_NAMES
from paceline.report.scaling.series import (
    efficiency,
    has_several_alone,
    largest,
    method_name,
    size_name,
    speed_up_of,
)
from paceline.report.sections import KeyFigure, Setting, Table
from paceline.results.json_object import number, text
from paceline.results.profile import Spread
from paceline.results.study import SizeResult, Study, Trained

Cell = Callable[[Study, SizeResult], str]


@dataclass(frozen=True, kw_only=True)
class _Column:
    """A column of the study's table."""

    title: str
    write: Cell
    always: bool = True
    """Whether it stands even where no size has anything to say in it."""


def key_figures(study: Study) -> tuple[KeyFigure, ...]:
    """Choose what to read first: the largest size, and one worker beside it."""
    alone = study.baseline_images_per_s
    chosen = [
        KeyFigure(label="One worker", value=figures.show_three_digits(alone), note="images/s")
    ]
    top = largest(study)
    if top and top[0].workers > 1 and not study.not_reliable:
        chosen += _of_largest(study, top[0])
    return tuple(figure for figure in chosen if figure.value != figures.NOTHING)


def study_table(study: Study) -> Table:
    """The study's table: a row for each size, and what its training reached where it trained."""
    methods = {method_name(study, size) for size in study.sizes if size.workers > 1}
    columns = [column for column in _COLUMNS if _is_shown(study, column)]
    if len(methods) < 2 and not has_several_alone(study):
        columns = [column for column in columns if column.title != "method"]
    return Table(
        header=tuple(column.title for column in columns),
        rows=tuple(tuple(column.write(study, size) for column in columns) for size in study.sizes),
    )


def parts_table(study: Study) -> Table:
    """The numbers behind the pictures of steps and fixed costs, in milliseconds."""
    header = (
        "size",
        *(f"{name}, ms" for name in PART_NAMES.values()),
        *(f"{name}, ms" for name in FIXED_NAMES.values()),
    )
    return Table(header=header, rows=tuple(_parts_row(study, size) for size in study.measured))


def repeats_table(study: Study) -> Table:
    """Every single measurement; with a column of problems where there was any."""
    failed = any(repeat.problem for size in study.sizes for repeat in size.repeats)
    rows = tuple(
        (
            size_name(study, size),
            str(place),
            figures.show_three_digits(repeat.images_per_s),
            figures.show_milliseconds(repeat.step_s),
            repeat.run_dir or figures.NOTHING,
            *([(repeat.problem or "").partition("\n")[0]] if failed else []),
        )
        for size in study.sizes
        for place, repeat in enumerate(size.repeats, 1)
    )
    header = ("size", "repeat", "images/s", "ms a step", "run directory")
    return Table(header=(*header, "problem") if failed else header, rows=rows)


def prediction_table(study: Study) -> Table:
    """What is predicted, a row for each method and size."""
    methods = {} if study.predicted is None else study.predicted.methods
    rows = tuple(
        (
            plural(size.workers, "worker"),
            method,
            figures.show_count(size.nodes),
            figures.show_whole_percent(size.efficiency),
            f"{figures.show_whole_percent(size.low)} to {figures.show_whole_percent(size.high)}",
            figures.show_three_digits(size.images_per_s),
            figures.show_milliseconds(size.step_s),
        )
        for method, sizes in methods.items()
        for size in sizes
    )
    header = ("size", "method", "nodes", "efficiency", "band", "images/s", "ms a step")
    return Table(header=header, rows=rows)


def link_text(study: Study) -> str:
    """Say which link the prediction is for; empty where it names none."""
    link = {} if study.predicted is None else study.predicted.link
    bandwidth = number(link, "bandwidth_bytes_per_s")
    round_trip = number(link, "round_trip_s")
    sentences = []
    if bandwidth is not None:
        sentences.append(f"{figures.show_bandwidth(bandwidth)} between nodes")
    if round_trip is not None:
        sentences.append(f"a round trip of {figures.show_time(round_trip)}")
    if source := text(link, "source"):
        return f"For this network: {source}."
    return f"For {figures.listed(sentences)}." if sentences else ""


def settings_table(study: Study) -> tuple[Setting, ...]:
    """How the study was made."""
    kept = {
        "weak": "the batch per worker stays the same (weak)",
        "strong": "the global batch stays the same (strong)",
    }
    rows = [
        ("scaling", kept[study.mode] if study.started_at else ""),
        ("repeats", figures.show_count(study.repeats or None)),
        ("measured for", figures.show_length(study.seconds or None)),
        ("device", study.device),
        ("cores", figures.show_count(study.cores)),
    ]
    rows += list(study.versions.items())
    return tuple(
        Setting(name=name, value=value)
        for name, value in rows
        if value not in ("", figures.NOTHING)
    )


def _of_largest(study: Study, size: SizeResult) -> list[KeyFigure]:
    names = [size_name(study, size)]
    speed_up = speed_up_of(study, size)
    epoch_s = size.epoch_s
    return [
        KeyFigure(
            label="Throughput",
            value=figures.show_three_digits(
                None if size.images_per_s is None else size.images_per_s.median
            ),
            note=f"images/s, {names[0]}",
        ),
        KeyFigure(
            label="Speed-up",
            value=figures.dashed(figures.show_times)(speed_up),
            note=f"of {size.workers:,} times",
        ),
        KeyFigure(
            label="Efficiency",
            value=figures.show_whole_percent(efficiency(study, size)),
            note="of one worker's, each",
        ),
        KeyFigure(
            label="Epoch",
            value=_time(epoch_s),
            note=names[0],
        ),
    ]


def _parts_row(study: Study, size: SizeResult) -> tuple[str, ...]:
    parts = {} if size.parts is None else asdict(size.parts)
    fixed = asdict(size.fixed)
    return (
        size_name(study, size),
        *(figures.show_milliseconds(parts.get(name)) for name in PART_NAMES),
        *(figures.show_milliseconds(fixed[name]) for name in FIXED_NAMES),
    )


def _is_shown(study: Study, column: _Column) -> bool:
    cells = {column.write(study, size) for size in study.sizes}
    return column.always or not cells <= {figures.NOTHING}


def _speed(study: Study, size: SizeResult) -> str:
    return _spread(size.images_per_s, figures.show_three_digits)


def _step(study: Study, size: SizeResult) -> str:
    return figures.show_milliseconds(None if size.step_s is None else size.step_s.median)


def _efficiency(study: Study, size: SizeResult) -> str:
    if size.efficiency is None:
        return figures.show_whole_percent(efficiency(study, size))
    return _spread(size.efficiency, _bare_percent, " %")


def _bare_percent(share: float) -> str:
    return figures.show_whole_percent(share).removesuffix(" %")


def _spread(figure: Spread | None, write: Callable[[float], str], unit: str = "") -> str:
    """Write a figure, and the spread where it shows in the digits: `319 (312 to 325)`."""
    if figure is None:
        return figures.NOTHING
    low, middle, high = (write(value) for value in (figure.low, figure.median, figure.high))
    around = "" if low == middle == high else f" ({low} to {high})"
    return f"{middle}{unit}{around}"


_time = figures.dashed(format_clock)


def _of_training(title: str, write: Callable[[Trained], str]) -> _Column:
    """Make a column of what the size's training reached, if it trained at all."""

    def cell(_: Study, size: SizeResult) -> str:
        return figures.NOTHING if size.trained is None else write(size.trained)

    return _Column(title=title, write=cell, always=False)


_COLUMNS = (
    _Column(title="workers", write=lambda _, size: figures.show_count(size.workers)),
    _Column(title="nodes", write=lambda _, size: figures.show_count(size.nodes)),
    _Column(title="method", write=lambda study, size: _method(study, size)),
    _Column(
        title="learning rate",
        write=lambda _, size: figures.dashed(figures.show_rate)(size.lr),
        always=False,
    ),
    _Column(title="global batch", write=lambda _, size: figures.show_count(size.global_batch)),
    _Column(
        title="steps an epoch",
        write=lambda _, size: figures.show_count(size.steps_per_epoch or None),
        always=False,
    ),
    _Column(title="epoch time", write=lambda _, size: _time(size.epoch_s), always=False),
    _Column(title="images/s", write=_speed),
    _Column(title="efficiency", write=_efficiency),
    _of_training("epochs trained", lambda trained: figures.show_count(trained.epochs)),
    _of_training(
        "best validation loss",
        lambda trained: figures.dashed(figures.show_loss)(trained.best_val_loss),
    ),
    _of_training(
        "best validation accuracy", lambda trained: figures.show_percent(trained.best_val_accuracy)
    ),
    _of_training("test loss", lambda trained: figures.dashed(figures.show_loss)(trained.test_loss)),
    _of_training("test top-1", lambda trained: figures.show_percent(trained.test_accuracy)),
    _of_training("trained for", lambda trained: _time(trained.train_time_s)),
    _Column(title="ms a step", write=_step),
    _Column(
        title="sent a step",
        write=lambda _, size: figures.dashed(figures.show_bytes)(size.wire_bytes_per_step),
        always=False,
    ),
)


def _method(study: Study, size: SizeResult) -> str:
    is_named = size.workers > 1 or has_several_alone(study)
    return method_name(study, size) if is_named else figures.NOTHING
