"""Runs side by side: settings that differ and last figures, as text or as one page."""

import math
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from markupsafe import Markup

from paceline._version import __version__
from paceline.errors import UsageError
from paceline.options import figures
from paceline.options.durations import format_duration
from paceline.options.figures import plural
from paceline.options.text import aligned, cut, printable
from paceline.report.charts import MAX_POINTS, spans_decades, thin
from paceline.report.load_run import RunReport
from paceline.report.runs.listing import RunEntry, read_entry, shared_unit
from paceline.report.scaling.charts import Line, Picture
from paceline.report.scaling.lines import draw_lines
from paceline.report.templating import fill_template, read_script, write_page
from paceline.results.find_runs import choose_run, find_runs, is_run
from paceline.results.json_object import JsonObject, entries, number, section, text
from paceline.results.run_directory import RunDirectory
from paceline.training.config import OF_RECIPES, typed_name

_MAX_CELL_LENGTH = 24
_LEFT_OUT = frozenset(
    "name tag note progress log_every share_run_dir tensorboard on init_method rank local_rank "
    "world_size interface workers numa_affinity max_restarts hang_after_s stop_grace_s "
    "batch_per_worker".split()
)
"""Settings that say nothing about what was trained, or that follow from others."""
_FOLLOWING = {
    "world_size": "workers",
    "nodes": "nodes",
    "train_samples": "training samples",
    "val_samples": "validation samples",
    "parameters": "parameters",
    "model": "model",
}
_CURVES = {
    "train_loss": "Training loss",
    "val_loss": "Validation loss",
    "val_accuracy": "Validation accuracy",
}


@dataclass(frozen=True)
class Row:
    """One thing that is compared, with a cell for each run."""

    label: str
    cells: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Runs beside each other."""

    runs: tuple[RunEntry, ...]
    settings: tuple[Row, ...]
    """Those that differ: settings, recipe arguments, versions and hosts."""
    figures: tuple[Row, ...]
    """How each run ended."""

    @property
    def letters(self) -> tuple[str, ...]:
        """A, B and so on: headings of the columns."""
        return tuple(chr(ord("A") + place) for place in range(len(self.runs)))


def choose_runs(places: Sequence[str]) -> tuple[RunEntry, ...]:
    """Find the runs that a user names: directories, folders of runs, or names of runs.

    Raises:
        UsageError: A word names no run, or several; or there are fewer than 2 or more than 26 runs.
    """
    found = {entry.report.path: entry for place in places for entry in _named(place)}
    if not 2 <= len(found) <= 26:
        raise UsageError(
            f"{plural(len(found), 'run')} to compare: name 2 to 26 run directories, or a folder "
            "that holds them"
        )
    return tuple(found.values())


def compare(runs: Sequence[RunEntry]) -> Comparison:
    """Compare runs: which settings differ, and how each ended."""
    return Comparison(
        runs=tuple(runs),
        settings=tuple(_differences([entry.report.run for entry in runs])),
        figures=tuple(_final_figures(runs)),
    )


def comparison_lines(shown: Comparison) -> Iterator[str]:
    """Lay out a comparison for a terminal."""
    for letter, entry in zip(shown.letters, shown.runs, strict=True):
        yield printable(f"{letter}  {entry.report.path}")
    for title, rows in (("setting", shown.settings), ("result", shown.figures)):
        yield ""
        cells = [
            [cut(printable(cell), _MAX_CELL_LENGTH) for cell in (row.label, *row.cells)]
            for row in rows
        ]
        yield from (
            aligned([[title, *shown.letters], *cells], left=(0,))
            if rows
            else ["No setting differs."]
        )


def write_comparison(shown: Comparison, path: Path) -> Path:
    """Write a comparison as a page that needs no network, with curves over each other.

    Raises:
        UsageError: There is a file that isn't such a page, or it can't be written.
        StorageError: The disk is full.
    """
    pictures = [picture for metric in _CURVES if (picture := _picture(shown, metric)).lines]
    generator = "Paceline runs"
    page = fill_template(
        "compare.html",
        title=f"{plural(len(shown.runs), 'run')} side by side",
        generator=generator,
        letters=shown.letters,
        runs=[
            (letter, *_link(run, path))
            for letter, run in zip(shown.letters, shown.runs, strict=True)
        ],
        problems=[f"{e.label}: {text}" for e in shown.runs for text in e.report.problems],
        settings=shown.settings,
        figures=shown.figures,
        pictures=[(picture, Markup(draw_lines(picture))) for picture in pictures],
        script=read_script("chart.js"),
        directory=str(path),
        paceline=__version__,
    )
    return write_page(path, page, generator, "`paceline compare`")


def _link(entry: RunEntry, page: Path) -> tuple[str, str, str]:
    """Return a run's directory, the link to its report ("" without one) and its state."""
    report = entry.report.path / "report.html"
    link = quote(os.fsencode(os.path.relpath(report, page.parent))) if report.is_file() else ""
    return str(entry.report.path), link, entry.state


def _picture(shown: Comparison, metric: str) -> Picture:
    """Make a picture of one figure by step, with a line for each run that has it."""
    is_share = metric.endswith("accuracy")
    write = figures.show_percent if is_share else figures.show_loss
    curves = [_curve(entry.report, metric) for entry in shown.runs]
    lines = [
        Line(label=letter, value=write(points[-1][1]), colour=place, points=points)
        for place, (letter, points) in enumerate(zip(shown.letters, curves, strict=True))
        if points
    ]
    values = [value for points in curves for _, value in points]
    return Picture(
        slug=metric.replace("_", "-"),
        title=_CURVES[metric],
        caption="",
        across="step",
        lines=tuple(lines),
        percent=is_share,
        log_up=not is_share and spans_decades(values),
    )


def _curve(report: RunReport, metric: str) -> tuple[tuple[float, float], ...]:
    """Return the steps at which a run's figure is known, and its values there."""
    table = report.steps if report.steps.has(metric) else report.metrics
    pairs = zip(table.column("step"), table.column(metric), strict=True)
    points = [pair for pair in pairs if not any(map(math.isnan, pair))]
    return tuple(points[place] for place in thin(len(points), MAX_POINTS))


def _named(place: str) -> Sequence[RunEntry]:
    run = RunDirectory.named(place)
    is_folder = run.path.is_dir() and not is_run(run.path)
    runs = find_runs(run.path).runs if is_folder else [choose_run(place)]
    found = [read_entry(each, each.path.name, with_steps=True) for each in runs]
    if is_folder:
        found = [entry for entry in found if entry.state != "damaged"]
    if not found:
        raise UsageError(f"{run.path} holds no training, and no folder in it does")
    return found


def _differences(runs: Sequence[JsonObject]) -> Iterator[Row]:
    """List what isn't the same in all runs: the recipe first, versions and hosts last."""
    described = [_described(run) for run in runs]
    for name in dict.fromkeys(name for one in described for name in one):
        if any(one.get(name) != described[0].get(name) for one in described[1:]):
            cells = [
                figures.show_value(one[name]) if name in one else figures.NOTHING
                for one in described
            ]
            yield Row(typed_name(name), tuple(cells))


def _described(run: JsonObject) -> Mapping[str, object]:
    """Return what may differ between two runs, by the name under which it is shown."""
    derived, settings = section(run, "derived"), section(run, "settings")
    left_out = _LEFT_OUT | (OF_RECIPES if run.get("kind") == "script" else frozenset())
    # A setting that was left open counts as what it resolved to, but for the number of shards.
    resolved = {n: derived[n] for n, v in settings.items() if v is None and n in derived}
    resolved.pop("shards", None)
    arguments = {**section(run, "recipe_arguments"), **settings, **resolved}
    words = run.get("script_args")
    hosts = [[text(host, "host"), text(host, "device")] for host in entries(run, "hosts")]
    return {
        **({"recipe": run["recipe"]} if "recipe" in run else {}),
        **(
            {"script arguments": shlex.join(map(str, words))}
            if words and isinstance(words, list)
            else {}
        ),
        **{name: value for name, value in arguments.items() if name not in left_out},
        **{label: _grouped(derived[name]) for name, label in _FOLLOWING.items() if name in derived},
        **section(run, "versions"),
        "hosts": [", ".join(filter(None, host)) for host in hosts],
    }


def _grouped(value: object) -> object:
    return f"{value:,}" if isinstance(value, int) else value


_Read = Callable[[RunEntry], float | None]


def _last(name: str, column: str = "") -> _Read:
    """Read a figure of the summary, or the newest one of the tables while there is none."""

    def read(entry: RunEntry) -> float | None:
        """Take the summary's figure, or the newest that a table has."""
        report = entry.report
        # Steps and time go on within an epoch; other figures are an epoch's, where there is one.
        tables = [report.metrics, report.steps]
        if column in ("step", "time_s"):
            tables.reverse()
        found = [number(report.summary, name), *(table.last(column) for table in tables)]
        return next((value for value in found if value is not None), None)

    return read


_loss = figures.dashed(figures.show_loss)
_FIGURES: Sequence[tuple[str, _Read, Callable[[float | None], str]]] = (
    (
        "best accuracy",
        lambda entry: entry.best if entry.best_by == "val_accuracy" else None,
        figures.show_percent,
    ),
    ("lowest loss", lambda entry: entry.best if entry.best_by == "val_loss" else None, _loss),
    ("validation accuracy", _last("val_accuracy", "val_accuracy"), figures.show_percent),
    ("validation top-5", _last("val_top5_accuracy", "val_top5_accuracy"), figures.show_percent),
    ("validation loss", _last("val_loss", "val_loss"), _loss),
    ("test accuracy", _last("test_accuracy"), figures.show_percent),
    ("test loss", _last("test_loss"), _loss),
    ("training loss", _last("train_loss", "train_loss"), _loss),
    ("epochs", lambda entry: entry.report.epochs_done, figures.show_count),
    ("steps", _last("steps", "step"), figures.show_count),
    ("training time", _last("train_time_s", "time_s"), figures.dashed(format_duration)),
    ("{}/s", _last("images_per_s", "images_per_s"), figures.show_speed),
)


def _final_figures(runs: Sequence[RunEntry]) -> Iterator[Row]:
    """List how the runs ended: their state, the usual figures, and those of scripts' own."""
    yield Row("state", tuple(entry.state for entry in runs))
    for label, read, write in _FIGURES:
        values = [read(entry) for entry in runs]
        if any(value is not None for value in values):
            yield Row(label.format(shared_unit(runs)), tuple(map(write, values)))
    own = [section(entry.report.summary, "figures") for entry in runs]
    for name in dict.fromkeys(name for one in own for name in one):
        write = figures.dashed(lambda value: f"{value:.4g}")
        yield Row(name, tuple(write(number(one, name)) for one in own))
