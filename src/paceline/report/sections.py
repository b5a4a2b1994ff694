"""The page's figures and tables as plain text cells; no HTML here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from paceline.options import figures
from paceline.options.durations import format_duration
from paceline.options.figures import plural
from paceline.report.charts import best_position, thin
from paceline.report.load_run import RunReport
from paceline.results.json_object import JsonObject, entries, number, section, text, whole

MAX_TABLE_ROWS = 250
"""More epochs than this are thinned in the table; `metrics.csv` has them all."""


@dataclass(frozen=True, kw_only=True)
class KeyFigure:
    """One large number."""

    label: str
    value: str
    note: str


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One line of a table of names and values."""

    name: str
    value: str
    given: bool = False
    """The user's own, not a default."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table with a header; the first cell of a row names the row."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    marked: int | None = None
    """The row to stress."""
    note: str = ""


def key_figures(report: RunReport) -> tuple[KeyFigure, ...]:
    """Choose what to read first; the summary's numbers, or the epochs' while there is none."""
    derived = section(report.run, "derived")
    chosen = (
        _accuracy(report),
        _validation_loss(report),
        _top5(report),
        _speed(report),
        _time(report),
        KeyFigure(
            label="Workers",
            value=figures.show_count(_first(report.summary, derived, "world_size")),
            note=_nodes(_first(report.summary, derived, "nodes")),
        ),
        KeyFigure(
            label="Global batch",
            value=figures.show_count(_first(report.summary, derived, "global_batch")),
            note=_shards(_first(report.summary, derived, "shards")),
        ),
    )
    return tuple(figure for figure in chosen if figure.value != figures.NOTHING)


def settings_table(report: RunReport) -> tuple[Setting, ...]:
    """List recipe arguments and settings, the user's own first."""
    given = report.run.get("given")
    own = {str(name) for name in given} if isinstance(given, list) else set()
    merged = {**section(report.run, "recipe_arguments"), **section(report.run, "settings")}
    rows = [
        Setting(name=name, value=figures.show_value(content), given=name in own)
        for name, content in merged.items()
    ]
    return tuple(sorted(rows, key=lambda row: not row.given))


def environment_table(report: RunReport) -> tuple[Setting, ...]:
    """List what followed from the settings on this machine, and the versions."""
    derived = dict(section(report.run, "derived"))
    rule = derived.pop("lr_rule", None)
    if rule:
        derived["lr"] = rule
    rows = [("started", moment(text(report.run, "started_at")))]
    if commit := section(report.run, "git"):
        changed = ", with changes" if commit.get("dirty") is True else ""
        rows.append(("commit", f"{text(commit, 'commit')[:12]}{changed}"))
    rows += [(name.replace("_", " "), _derived(v)) for name, v in derived.items()]
    rows += [(name, figures.show_value(v)) for name, v in section(report.run, "versions").items()]
    return tuple(Setting(name=name, value=content) for name, content in rows if content)


def hosts_table(report: RunReport) -> Table:
    """List the hosts with their ranks and devices."""
    rows = tuple(
        (
            text(host, "host"),
            figures.show_value(host.get("ranks")),
            text(host, "device"),
            text(host, "cpu"),
            figures.show_count(number(host, "cores")),
        )
        for host in entries(report.run, "hosts")
    )
    return Table(header=("host", "ranks", "device", "CPU", "cores"), rows=rows)


def history_table(report: RunReport) -> Table:
    """List the attempts: the start, and each resume and restart."""
    rows = tuple(
        (
            text(entry, "reason"),
            moment(text(entry, "started_at")),
            figures.show_count(number(entry, "world_size")),
            figures.show_count(number(entry, "from_step")),
        )
        for entry in entries(report.run, "history")
    )
    return Table(header=("attempt", "at", "workers", "from step"), rows=rows)


def epochs_table(report: RunReport) -> Table:
    """List the epochs with the columns that hold any number; the best epoch is marked."""
    metrics = report.metrics
    best = best_position(report)
    shown = [column for column in _COLUMNS if metrics.has(column[0])]
    if not number(report.summary, "wire_bytes_per_step"):  # one worker
        shown = [column for column in shown if column[0] not in _BETWEEN_WORKERS]
    positions = thin(len(metrics), MAX_TABLE_ROWS, () if best is None else (best,))
    rows = tuple(
        tuple(write(metrics.column(name)[position]) for name, _, write in shown)
        for position in positions
    )
    thinned = len(positions) < len(metrics)
    return Table(
        header=tuple(title for _, title, _ in shown),
        rows=rows,
        marked=positions.index(best) if best is not None else None,
        note=f"{len(rows)} of {len(metrics):,} epochs; metrics.csv has all" if thinned else "",
    )


def outcome_table(report: RunReport) -> tuple[Setting, ...]:
    """List what the summary counts beside the key figures."""
    wanted = (
        ("steps", "steps"),
        ("samples_seen", "samples seen"),
        ("val_samples", "validation samples"),
        ("train_loss", "training loss"),
        ("snapshots_written", "snapshots written"),
        ("snapshots_skipped", "snapshots skipped"),
        ("restarts", "restarts"),
    )
    rows = []
    for name, label in wanted:
        value = number(report.summary, name)
        if value is not None:
            write = (
                figures.dashed(figures.show_loss) if name == "train_loss" else figures.show_count
            )
            rows.append(Setting(name=label, value=write(value)))
    return tuple(rows)


_Writer = Callable[[float], str]


_BETWEEN_WORKERS = ("exposed_comm", "waiting")
_COLUMNS: tuple[tuple[str, str, _Writer], ...] = (
    ("epoch", "epoch", figures.show_count),
    ("train_loss", "training loss", figures.dashed(figures.show_loss)),
    ("val_loss", "validation loss", figures.dashed(figures.show_loss)),
    ("train_accuracy", "training accuracy", figures.show_percent),
    ("val_accuracy", "validation accuracy", figures.show_percent),
    ("train_top5_accuracy", "training top-5", figures.show_percent),
    ("val_top5_accuracy", "validation top-5", figures.show_percent),
    ("lr", "learning rate", figures.dashed(figures.show_rate)),
    ("images_per_s", "images/s", figures.show_speed),
    ("batch_time_s", "ms a step", figures.show_milliseconds),
    ("data_time_s", "ms for data", figures.show_milliseconds),
    ("exposed_comm", "communication", figures.show_percent),
    ("waiting", "waiting for the slowest", figures.show_percent),
    ("step", "step", figures.show_count),
    ("time_s", "time", figures.dashed(format_duration)),
)


def moment(written: str) -> str:
    """A time of ISO 8601 to the second, in UTC where it says so."""
    try:
        moment = datetime.fromisoformat(written)
    except ValueError:
        return written
    zone = " UTC" if moment.utcoffset() == timedelta(0) else f" {moment:%z}"
    return f"{moment:%Y-%m-%d %H:%M:%S}{zone}".rstrip()


def _derived(content: object) -> str:
    counted = isinstance(content, int) and not isinstance(content, bool)
    return f"{content:,}" if counted else figures.show_value(content)


def _first(summary: JsonObject, derived: Mapping[str, object], name: str) -> float | None:
    value = number(summary, name)
    return number(derived, name) if value is None else value


def _accuracy(report: RunReport) -> KeyFigure:
    position = best_position(report)
    best = number(report.summary, "best_val_accuracy")
    epoch = whole(report.summary, "best_epoch")
    if best is None and position is not None:
        best = report.metrics.column("val_accuracy")[position]
    if epoch is None and position is not None:
        epoch = int(report.metrics.column("epoch")[position])
    note = "validation" if epoch is None else f"epoch {epoch:,}"
    return KeyFigure(label="Best accuracy", value=figures.show_percent(best), note=note)


def _validation_loss(report: RunReport) -> KeyFigure:
    value = number(report.summary, "val_loss")
    value = report.metrics.last("val_loss") if value is None else value
    return KeyFigure(
        label="Validation loss", value=figures.dashed(figures.show_loss)(value), note="last epoch"
    )


def _top5(report: RunReport) -> KeyFigure:
    value = number(report.summary, "val_top5_accuracy")
    value = report.metrics.last("val_top5_accuracy") if value is None else value
    return KeyFigure(label="Top-5 accuracy", value=figures.show_percent(value), note="last epoch")


def _speed(report: RunReport) -> KeyFigure:
    value = number(report.summary, "images_per_s")
    value = report.metrics.last("images_per_s") if value is None else value
    return KeyFigure(label="Images/s", value=figures.show_speed(value), note="all workers")


def _time(report: RunReport) -> KeyFigure:
    value = number(report.summary, "train_time_s")
    value = report.metrics.last("time_s") if value is None else value
    shown = figures.dashed(format_duration)(value)
    done = whole(report.summary, "epochs")
    epochs = plural(len(report.metrics) if done is None else done, "epoch")
    return KeyFigure(label="Training time", value=shown, note=epochs)


def _nodes(nodes: float | None) -> str:
    return "" if nodes is None else f"on {plural(int(nodes), 'node')}"


def _shards(shards: float | None) -> str:
    return "" if shards is None else f"in {plural(int(shards), 'shard')}"
