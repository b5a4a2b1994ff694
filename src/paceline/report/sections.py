"""The page's figures and tables as plain text cells; no HTML here."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from heapq import nlargest

from paceline.errors import UsageError
from paceline.options import figures
from paceline.options.durations import format_clock, format_duration, parse_duration_s
from paceline.options.figures import plural
from paceline.report.charts import best_position, own_columns, show_own, thin
from paceline.report.load_run import RunReport
from paceline.results.confusion import Confusion, shorten, strength
from paceline.results.json_object import JsonObject, entries, number, section, text, texts, whole
from paceline.training.config import typed_name

MAX_TABLE_ROWS = 250
"""More epochs than this are thinned in the table; `metrics.csv` has them all."""
MAX_HOSTS = 4
"""Named at the top of the page; the others are counted."""
MAX_CLASSES = 25
"""With more the confusion matrix isn't a table: its mistakes are listed."""
MAX_MISTAKES = 30
_LONGEST_S = 1e9
_EMPTY = ("", "none", figures.NOTHING)
"""What a cell says where nothing is known."""


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
    figures_from: int | None = None
    """From this column on there are figures; none where all is text."""


def run_name(report: RunReport) -> str:
    """What the run is called: the name that its user gave, else its directory's."""
    return text(section(report.run, "settings"), "name") or report.path.name


def facts_table(report: RunReport, *, running: bool) -> tuple[Setting, ...]:
    """List what says which run this is, and how far it is while it runs."""
    start = facts(
        started_at=text(report.run, "started_at"),
        hosts=[text(host, "host") for host in entries(report.run, "hosts")],
        command=texts(report.run, "command"),
    )
    return (*start, *_progress(report)) if running else start


def facts(*, started_at: str, hosts: Sequence[str], command: Sequence[str]) -> tuple[Setting, ...]:
    """Lay out what stands at the top of a page: start, hosts and command."""
    more = f" and {len(hosts) - MAX_HOSTS:,} more" if len(hosts) > MAX_HOSTS else ""
    rows = (
        ("Started", moment(started_at)),
        ("Hosts" if len(hosts) > 1 else "Host", ", ".join(hosts[:MAX_HOSTS]) + more),
        ("Command", shlex.join(command)),
    )
    return tuple(Setting(name=name, value=value) for name, value in rows if value)


def _progress(report: RunReport) -> tuple[Setting, ...]:
    """Say when this was read, and when the training will be through."""
    facts = [Setting(name="Written", value=moment(report.read_at.isoformat()))]
    left_s = remaining_s(report)
    if left_s is not None and report.epoch_at is not None:
        ends = max(report.epoch_at + timedelta(seconds=left_s), report.read_at)
        left = format_duration((ends - report.read_at).total_seconds())
        facts.append(Setting(name="ETA", value=f"{moment(ends.isoformat())}, in {left} at most"))
    return tuple(facts)


def remaining_s(report: RunReport) -> float | None:
    """Say how long the epochs that are planned take from the newest one's end, as those before.

    A time budget may end it earlier. None where no epoch is done or nothing says how many come.
    """
    settings = section(report.run, "settings")
    planned, done = number(settings, "epochs"), report.metrics.last("epoch")
    spent_s = report.metrics.last("time_s")
    if not planned or not done or not spent_s or done < 1:
        return None
    left_s = max(planned - done, 0.0) * spent_s / done
    with suppress(UsageError):
        budget_s = parse_duration_s(text(settings, "time_budget"))
        left_s = min(left_s, max(budget_s - spent_s, 0.0))
    return left_s if left_s < _LONGEST_S else None


def key_figures(report: RunReport) -> tuple[KeyFigure, ...]:
    """Choose what to read first; the summary's numbers, or the epochs' while there is none."""
    derived = section(report.run, "derived")
    chosen = (
        _accuracy(report),
        KeyFigure(
            label="Validation loss",
            value=figures.dashed(figures.show_loss)(report.figure("val_loss")),
            note="last epoch",
        ),
        KeyFigure(
            label="Top-5 accuracy",
            value=figures.show_percent(report.figure("val_top5_accuracy")),
            note="last epoch",
        ),
        KeyFigure(
            label=f"{report.unit.capitalize()}/s",
            value=figures.show_speed(report.figure("images_per_s")),
            note="all workers",
        ),
        KeyFigure(
            label="Training time",
            value=figures.dashed(format_duration)(report.figure("train_time_s", "time_s")),
            note=plural(report.epochs_done, "epoch"),
        ),
        KeyFigure(
            label="Workers",
            value=figures.show_count(_first(report.summary, derived, "world_size")),
            note=_nodes(_first(report.summary, derived, "nodes")),
        ),
        KeyFigure(
            label="Global batch",
            value=figures.show_count(_first(report.summary, derived, "global_batch")),
            note=_division(report, derived),
        ),
    )
    return tuple(figure for figure in chosen if figure.value != figures.NOTHING)


def settings_table(report: RunReport) -> tuple[Setting, ...]:
    """List recipe arguments and settings, the user's own first."""
    given = report.run.get("given")
    own = {str(name) for name in given} if isinstance(given, list) else set()
    merged = {**section(report.run, "recipe_arguments"), **section(report.run, "settings")}
    rows = [
        Setting(name=typed_name(name), value=figures.show_value(content), given=name in own)
        for name, content in merged.items()
    ]
    return tuple(sorted(rows, key=lambda row: not row.given))


_HERE = ("backend", "threads")
"""Of what followed from the settings: what the machine decides."""
_GPU = {"gpu": "GPU", "driver": "driver", "cuda": "CUDA", "cudnn": "cuDNN"}


def environment_table(report: RunReport) -> tuple[Setting, ...]:
    """List what the training ran on: code, libraries and hardware, as far as it is recorded."""
    rows = []
    if commit := section(report.run, "git"):
        changed = ", with changes" if commit.get("dirty") is True else ""
        rows.append(("git commit", f"{text(commit, 'commit')[:12]}{changed}"))
    names = {"python": "Python", "paceline": "Paceline"}
    versions = section(report.run, "versions")
    rows += [(names.get(name, name), figures.show_value(v)) for name, v in versions.items()]
    derived, numerics = section(report.run, "derived"), section(report.run, "numerics")
    rows.append(("CPU", text(numerics, "cpu") or _one(report, "cpu")))
    rows += [(shown, figures.show_value(numerics.get(name))) for name, shown in _GPU.items()]
    if "gpu" not in numerics:
        rows.append(("device", text(derived, "device") or _one(report, "device")))
    rows += [(name, figures.show_value(derived.get(name))) for name in _HERE]
    return _known(rows)


def resolved_table(report: RunReport) -> tuple[Setting, ...]:
    """List what followed from the settings, the data and the number of workers."""
    derived = dict(section(report.run, "derived"))
    if rule := derived.pop("lr_rule", None):
        derived["lr"] = str(rule).removeprefix("lr ")
    elsewhere = {*_HERE, "device"}
    if number(section(report.run, "settings"), "shards") is None:
        elsewhere.add("shards")  # without --shards as many as workers
    return _known(
        [(n.replace("_", " "), _derived(v)) for n, v in derived.items() if n not in elsewhere]
    )


def _known(rows: Sequence[tuple[str, str]]) -> tuple[Setting, ...]:
    """Make settings of names and texts; of those that say something."""
    return tuple(Setting(name=name, value=shown) for name, shown in rows if shown not in _EMPTY)


def _one(report: RunReport, name: str) -> str:
    """Give what all hosts have alike; empty where they differ, or don't say."""
    found = {text(host, name) for host in entries(report.run, "hosts")}
    return found.pop() if len(found) == 1 else ""


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
    header = ("host", "ranks", "device", "CPU", "cores")
    # Columns in which no host says anything are left out.
    kept = [i for i in range(len(header)) if any(row[i] not in _EMPTY for row in rows)]
    return Table(
        header=tuple(header[i] for i in kept),
        rows=tuple(tuple(row[i] for i in kept) for row in rows if kept),
    )


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
    own = [(name, name, show_own) for name in own_columns(metrics)]
    shown = [column for column in (*_COLUMNS, *own) if metrics.has(column[0])]
    if not number(report.summary, "wire_bytes_per_step"):  # one worker
        shown = [column for column in shown if column[0] not in _BETWEEN_WORKERS]
    positions = thin(len(metrics), MAX_TABLE_ROWS, () if best is None else (best,))
    rows = tuple(
        tuple(write(metrics.column(name)[position]) for name, _, write in shown)
        for position in positions
    )
    thinned = len(positions) < len(metrics)
    return Table(
        header=tuple(
            f"{report.unit}/s" if name == "images_per_s" else title for name, title, _ in shown
        ),
        rows=rows,
        marked=positions.index(best) if best is not None else None,
        figures_from=0,
        note=f"{len(rows)} of {len(metrics):,} epochs; metrics.csv has all" if thinned else "",
    )


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell of a confusion matrix."""

    count: str
    strength: str
    """How strongly to colour it, as CSS's percentage: the root of its share of the row."""
    right: bool
    tooltip: str
    """What it says, in a sentence."""


def confusion_rows(confusion: Confusion) -> tuple[tuple[str, tuple[Cell, ...]], ...]:
    """Lay out a confusion matrix: each class's name with its cells; none for too many classes."""
    if len(confusion.classes) > MAX_CLASSES:
        return ()
    return tuple(
        (
            shorten(confusion.classes[truth]),
            tuple(_cell(confusion, truth, answer) for answer in range(len(row))),
        )
        for truth, row in enumerate(confusion.counts)
    )


def _cell(confusion: Confusion, truth: int, answer: int) -> Cell:
    row, names = confusion.counts[truth], confusion.classes
    share = f"{figures.show_count(row[answer])} of {sum(row):,} samples of {names[truth]}"
    verdict = "answered right" if truth == answer else f"taken for {names[answer]}"
    part = f" ({figures.show_whole_percent(row[answer] / sum(row))})" if sum(row) else ""
    return Cell(
        count=figures.show_count(row[answer]),
        strength=f"{100 * strength(row[answer], row):.0f}%",
        right=truth == answer,
        tooltip=f"{share} {verdict}{part}",
    )


def mistakes_table(confusion: Confusion) -> Table:
    """List the most frequent mistakes."""
    mistakes = confusion.mistakes()
    largest = nlargest(MAX_MISTAKES, mistakes, key=lambda mistake: mistake[0])
    rows = tuple(
        (
            confusion.classes[truth],
            confusion.classes[answer],
            figures.show_count(count),
            figures.show_whole_percent(count / sum(confusion.counts[truth])),
        )
        for count, truth, answer in largest
    )
    return Table(
        header=("class", "taken for", "samples", "share of the class"),
        figures_from=2,
        rows=rows,
        note=f"the {len(rows)} most frequent of {plural(len(mistakes), 'pair')}",
    )


def classes_table(confusion: Confusion) -> Table:
    """List recall, precision and F1 of each class, and their means; worst first where many."""
    listed = list(confusion.per_class)
    if len(listed) > MAX_CLASSES:
        listed.sort(key=lambda each: -1.0 if each.f1 is None else each.f1)
    shown = listed[:MAX_TABLE_ROWS]
    rows = tuple(
        (
            each.name,
            figures.show_percent(each.recall),
            figures.show_percent(each.precision),
            figures.show_percent(each.f1),
            figures.show_count(each.samples),
        )
        for each in (*shown, confusion.mean)
    )
    cut = len(shown) < len(listed)
    return Table(
        header=("class", "recall", "precision", "F1", "samples"),
        figures_from=1,
        rows=rows,
        marked=len(rows) - 1,
        note=f"the {len(shown)} with the lowest F1 of {len(listed):,} classes" if cut else "",
    )


def describe_confusion(confusion: Confusion) -> str:
    """Say what was evaluated, and how many answers were right."""
    of = f" of snapshot {confusion.snapshot}" if confusion.snapshot else ""
    share = confusion.right / confusion.samples if confusion.samples else None
    return (
        f"Evaluation{of}: {confusion.right:,} of {plural(confusion.samples, 'sample')} right "
        f"({figures.show_percent(share)})."
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
    ("gpu_utilization", "GPU utilization", figures.show_percent),
    ("gpu_memory_bytes", "GPU memory", figures.dashed(figures.show_bytes)),
    ("step", "step", figures.show_count),
    ("time_s", "time", figures.dashed(format_clock)),
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
    label = "Best accuracy"
    if section(report.run, "settings").get("best_by") == "val_loss":
        label, note = "Accuracy", f"{note}, with the best loss"
    return KeyFigure(label=label, value=figures.show_percent(best), note=note)


def _nodes(nodes: float | None) -> str:
    return "" if nodes is None else f"on {plural(int(nodes), 'node')}"


def _division(report: RunReport, derived: JsonObject) -> str:
    """Say into how many shards the batch is divided; without `--shards`, among how many workers."""
    parts = _first(report.summary, derived, "shards")
    if parts is None:
        return ""
    if number(section(report.run, "settings"), "shards") is not None:
        return f"in {plural(int(parts), 'shard')}"
    workers = _first(report.summary, derived, "world_size")
    return "" if workers is None or workers < 2 else f"over {int(workers)} workers"
