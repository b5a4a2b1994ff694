"""What differs between runs: their settings, their final figures, and which runs are compared."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.errors import UsageError
from paceline.options import figures
from paceline.options.durations import format_duration
from paceline.options.figures import plural
from paceline.report.load_run import read_run
from paceline.report.runs.listing import (
    RunEntry,
    arguments_of,
    list_runs,
    read_entry,
    shared_unit,
    sort_runs,
)
from paceline.results.find_runs import choose_run, is_run
from paceline.results.json_object import JsonObject, entries, number, section, text
from paceline.results.run_directory import RunDirectory
from paceline.training.config import OF_RECIPES, typed_name

MAX_SHOWN = 8
"""More columns or lines beside each other than these nobody can read."""

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


@dataclass(frozen=True, kw_only=True)
class Row:
    """One thing that is compared, a value for each run; None where a run has none."""

    name: str
    values: tuple[object, ...]
    cells: tuple[str, ...]

    is_setting: bool = False

    @property
    def label(self) -> str:
        """Its name on the screen: a setting's is the one that `--help` lists."""
        return typed_name(self.name) if self.is_setting else self.name


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Runs beside each other."""

    runs: tuple[RunEntry, ...]
    given: int
    """How many were to be compared; the newest are shown."""
    settings: tuple[Row, ...]
    """Those that differ: settings, recipe arguments, versions and hosts."""
    figures: tuple[Row, ...]
    """How each run ended."""

    @property
    def letters(self) -> tuple[str, ...]:
        """A, B and so on: what the columns are called."""
        return tuple(chr(ord("A") + place) for place in range(len(self.runs)))

    @property
    def left_out(self) -> str:
        """Say which runs aren't shown; empty where all are."""
        if self.given <= len(self.runs):
            return ""
        return (
            f"Of {self.given} runs the {len(self.runs)} newest are shown. Name others to see "
            "them, or use --json"
        )


def choose_runs(places: Sequence[str]) -> tuple[RunEntry, ...]:
    """Find the runs that a user names: directories, folders of runs, or names of runs.

    Raises:
        UsageError: Something names no run, or several; or there are fewer than two runs.
    """
    chosen: dict[Path, RunEntry] = {}
    for place in places:
        for entry in _named(place):
            chosen.setdefault(entry.report.path, entry)
    if len(chosen) < 2:
        raise UsageError(
            f"{plural(len(chosen), 'run')} to compare: name at least two run directories, or a "
            "folder that holds them"
        )
    return tuple(chosen.values())


def compare(runs: Sequence[RunEntry], most: int | None = MAX_SHOWN) -> Comparison:
    """Put runs side by side.

    Args:
        most: With more runs the newest are taken; None takes all.
    """
    newest = sort_runs(runs, "started")[:most]
    shown = tuple(_with_steps(entry) for entry in runs if entry in newest)
    return Comparison(
        runs=shown,
        given=len(runs),
        settings=_differences([entry.report.run for entry in shown]),
        figures=_final_figures(shown),
    )


def _named(place: str) -> Sequence[RunEntry]:
    run = RunDirectory.named(place)
    path = run.path
    if is_run(path):
        return [read_entry(run, path.name)]
    if path.is_dir():
        found = [entry for entry in list_runs(path).entries if entry.state != "damaged"]
        if not found:
            raise UsageError(f"{path} holds no training, and no folder in it does")
        return found
    run = choose_run(place)
    return [read_entry(run, run.path.name)]


def _with_steps(entry: RunEntry) -> RunEntry:
    """Read what the run has recorded within its epochs, too."""
    return replace(entry, report=read_run(RunDirectory(entry.report.path)))


def _differences(runs: Sequence[JsonObject]) -> tuple[Row, ...]:
    """List what isn't the same in all runs: the recipe first, versions and hosts last."""
    described = [_described(run) for run in runs]
    names = dict.fromkeys(name for one in described for name in one)
    rows = []
    for name in names:
        values = tuple(one.get(name) for one in described)
        if any(value != values[0] for value in values[1:]):
            cells = tuple(
                _show(name, one[name]) if name in one else figures.NOTHING for one in described
            )
            rows.append(Row(name=name, values=values, cells=cells, is_setting=True))
    return tuple(rows)


def _show(name: str, value: object) -> str:
    """Write a value; counts as everywhere else, settings as they are given."""
    counted = name in _FOLLOWING.values() and isinstance(value, int)
    return f"{value:,}" if counted else figures.show_value(value)


def _described(run: JsonObject) -> Mapping[str, object]:
    """Give what may differ between two runs, by the name under which it is shown."""
    derived = section(run, "derived")
    followed = {label: derived[name] for name, label in _FOLLOWING.items() if name in derived}
    left_out = _LEFT_OUT | (OF_RECIPES if run.get("kind") == "script" else frozenset())
    arguments = {n: v for n, v in arguments_of(run).items() if n not in left_out}
    if "shards" in arguments:  # left open, it is the number of workers
        arguments["shards"] = section(run, "settings").get("shards")
    words = run.get("script_args")
    script = {"script arguments": shlex.join(map(str, words))} if isinstance(words, list) else {}
    script = {name: text for name, text in script.items() if text}
    hosts = {"hosts": [_host(host) for host in entries(run, "hosts")]}
    named = {"recipe": run["recipe"]} if "recipe" in run else {}
    return {**named, **script, **arguments, **followed, **section(run, "versions"), **hosts}


def _host(host: JsonObject) -> str:
    return ", ".join(part for part in (text(host, "host"), text(host, "device")) if part)


_Read = Callable[[RunEntry], float | None]
_Write = Callable[[float | None], str]


def _of_summary(name: str, column: str = "") -> _Read:
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


def _best(column: str) -> _Read:
    return lambda entry: entry.best if entry.best_by == column else None


_loss = figures.dashed(figures.show_loss)
_own = figures.dashed(lambda value: f"{value:.4g}")
_FIGURES: Sequence[tuple[str, _Read, _Write]] = (
    ("best accuracy", _best("val_accuracy"), figures.show_percent),
    ("lowest loss", _best("val_loss"), _loss),
    ("validation accuracy", _of_summary("val_accuracy", "val_accuracy"), figures.show_percent),
    (
        "validation top-5",
        _of_summary("val_top5_accuracy", "val_top5_accuracy"),
        figures.show_percent,
    ),
    ("validation loss", _of_summary("val_loss", "val_loss"), _loss),
    ("test accuracy", _of_summary("test_accuracy"), figures.show_percent),
    ("test loss", _of_summary("test_loss"), _loss),
    ("training loss", _of_summary("train_loss", "train_loss"), _loss),
    ("epochs", lambda entry: entry.epochs, figures.show_count),
    ("steps", _of_summary("steps", "step"), figures.show_count),
    ("training time", _of_summary("train_time_s", "time_s"), figures.dashed(format_duration)),
    ("{}/s", _of_summary("images_per_s", "images_per_s"), figures.show_speed),
)


def _final_figures(runs: Sequence[RunEntry]) -> tuple[Row, ...]:
    """List how the runs ended: their state, the usual figures, and those of scripts' own."""
    states = tuple(entry.state for entry in runs)
    rows = [Row(name="state", values=states, cells=states)]
    for name, read, write in _FIGURES:
        values = tuple(read(entry) for entry in runs)
        cells = tuple(write(value) for value in values)
        rows.append(Row(name=name.format(shared_unit(runs)), values=values, cells=cells))
    own = [section(entry.report.summary, "figures") for entry in runs]
    for name in dict.fromkeys(name for one in own for name in one):
        values = tuple(number(one, name) for one in own)
        cells = tuple(map(_own, values))
        rows.append(Row(name=name, values=values, cells=cells))
    return tuple(row for row in rows if any(value is not None for value in row.values))
