"""What a training shows: a progress bar on a terminal, plain lines in a pipe, nothing twice."""

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Literal, final

from paceline.options.durations import format_clock
from paceline.options.figures import show_bytes, show_loss, show_percent, show_rate
from paceline.options.text import fitted, fitting, printable
from paceline.results.metrics_table import EpochRow
from paceline.results.run_directory import SampleUnit

if TYPE_CHECKING:
    from rich.progress import Progress


@dataclass(frozen=True, kw_only=True)
class Communication:
    """Shares of time and bytes a step that communication takes, for the console."""

    exposed: float
    """Share of the time in which the slowest worker waits for communication."""
    waiting: float
    """Share in which the workers wait for the slowest, on average."""
    wire_bytes: float
    """What one worker sends in a step."""


_PLAIN_EVERY_S = 10.0
_LEAST_BAR, _MOST_BAR = 6, 24
"""Columns of the bar."""
_PER_S: Mapping[SampleUnit, str] = {"images": "img/s", "samples": "samples/s"}
_USUAL_WIDTHS = {"loss": 11, "speed": 12, "lr": 10, "left": 9}
"""Columns that figures of the progress line have from the beginning, as most come to that."""
_DROPPED_FIRST: Sequence[Sequence[str]] = (
    (),
    ("wire",),
    ("wire", "gpu"),
    ("wire", "gpu", "lr"),
    ("wire", "gpu", "lr", "comm"),
)
"""Figures that a narrow terminal goes without, to keep its bar;"""
_DROPPED_NEXT: Sequence[Sequence[str]] = (
    ("wire", "gpu", "lr", "comm", "accuracy"),
    ("wire", "gpu", "lr", "comm", "accuracy", "speed"),
)
"""and those that a narrower one goes without, having none."""


@dataclass(frozen=True, kw_only=True)
class Advance:
    """Progress within an epoch, as the console shows it."""

    epoch: int
    """Counted from 1."""
    epochs: int
    step: int
    """Within the epoch."""
    steps: int
    """Of the epoch."""
    loss: float
    accuracy: float | None
    images_per_s: float
    lr: float
    eta_s: float | None
    """Time to the end of the training at this speed; None where its length isn't known."""
    spent: Communication | None = None
    """What the steps spend on communication; None of a single worker."""
    gpu_utilization: float | None = None
    """Share of the last second in which this worker's GPU computed; None where nobody tells it."""
    gpu_memory_bytes: int | None = None
    """The most that tensors have taken of it so far."""
    unit: SampleUnit = "images"

    def text(self) -> str:
        """Write it as one line, without the position."""
        return "  ".join(text for text in self.figures().values() if text)

    def bar_line(
        self, width: int, *, plain: bool = False, widths: Mapping[str, int] | None = None
    ) -> str:
        """Write position, bar and figures so that the line fits a terminal.

        Where there is little room the bar gets shorter. Before it goes, the bytes a step, the GPU,
        the learning rate and the share of communication do; without it, these, the accuracy and the
        speed go one after the other. No figure is ever cut.

        Args:
            plain: The terminal shows ASCII alone.
            widths: The least columns of each figure, so that those behind it stay where they were.
        """
        least = widths or {}
        figures = {n: t.ljust(least.get(n, 0)) for n, t in self.figures().items() if t}
        steps = self.position().rjust(len(f"{self.steps}/{self.steps}"))
        long, brief = f"epoch {self.epoch}/{self.epochs}", f"{self.epoch}/{self.epochs}"
        # First with a bar of a useful length.
        for dropped in _DROPPED_FIRST:
            kept = [text for name, text in figures.items() if name not in dropped]
            for place, gap in ((long, "  "), (long, " "), (brief, " ")):
                text = gap.join(kept)
                room = width - len(f"{place}  {steps} {text}")
                if room >= _LEAST_BAR:
                    drawn = bar(min(room, _MOST_BAR), self.step, self.steps, plain=plain)
                    return f"{place} {drawn} {steps} {text}".rstrip()
        # Without one: leave out figures until it fits, the least important first.
        line = ""
        for dropped in (*_DROPPED_FIRST, *_DROPPED_NEXT):
            kept = [text for name, text in figures.items() if name not in dropped]
            for place in (long, brief):
                line = " ".join((place, self.position(), *kept)).rstrip()
                if len(line) <= width:
                    return line
        return line

    def position(self) -> str:
        """Write the step, and of how many where that is known."""
        return f"{self.step}/{self.steps}" if self.steps else f"step {self.step}"

    def figures(self) -> dict[str, str]:
        """Write each figure; empty where it isn't known."""
        spent = self.spent
        used, memory = self.gpu_utilization, self.gpu_memory_bytes
        gpu = ["" if used is None else _whole(used), show_bytes(memory) if memory else ""]
        speed = f"{self.images_per_s:,.0f} {_PER_S[self.unit]}" if self.images_per_s else ""
        return {
            "loss": f"loss {show_loss(self.loss)}",
            "accuracy": "" if self.accuracy is None else f"acc {show_percent(self.accuracy):>7}",
            "speed": speed,
            "comm": f"comm {_whole(spent.exposed + spent.waiting)}" if spent else "",
            "wire": f"{show_bytes(spent.wire_bytes)}/step" if spent else "",
            "gpu": " ".join(("GPU", *filter(None, gpu))) if any(gpu) else "",
            "lr": f"lr {show_rate(self.lr)}",
            "left": "" if self.eta_s is None else f"ETA {format_clock(self.eta_s)}",
        }


def bar(length: int, done: int, total: int, *, plain: bool) -> str:
    """Draw a bar of so many columns.

    Args:
        length: Columns.
        done: How much is done,
        total: of how much; 0 where that isn't known.
        plain: With ASCII alone.
    """
    filled = min(length, length * done // max(1, total))
    full, empty = ("#", "-") if plain else ("━", "─")
    return full * filled + empty * (length - filled)


class Console(ABC):
    """Shows a training to a person; only rank 0 has one that prints."""

    @abstractmethod
    def say(self, line: str) -> None:
        """Show one line at once, above the progress."""

    @abstractmethod
    def warn(self, line: str) -> None:
        """Show what the user has to know, however little else is shown."""

    @abstractmethod
    def is_due(self) -> bool:
        """Return whether `advance` would show anything now; asked about once a second."""

    @abstractmethod
    def advance(self, advance: Advance) -> None:
        """Show how far the epoch is."""

    @abstractmethod
    def evaluating(self, what: str, done: int, total: int) -> None:
        """Show how far an evaluation is; called for each batch.

        Args:
            what: What is evaluated, such as `epoch 2/5  validation`.
            done: This worker's batches that were begun.
            total: Of how many; 0 where that isn't known.
        """

    @abstractmethod
    def epoch(self, row: EpochRow, unit: SampleUnit) -> None:
        """Show a finished epoch's figures as a row of the table."""

    @abstractmethod
    def close(self) -> None:
        """Leave the terminal as it was; called once, also after an error."""


@final
class SilentConsole(Console):
    """Shows nothing but warnings."""

    def say(self, line: str) -> None:
        """Do nothing."""

    def warn(self, line: str) -> None:
        """Print the line (on ranks other than 0 it goes to the log)."""
        _print(line)

    def is_due(self) -> bool:
        """Never."""
        return False

    def advance(self, advance: Advance) -> None:
        """Do nothing."""

    def evaluating(self, what: str, done: int, total: int) -> None:
        """Do nothing."""

    def epoch(self, row: EpochRow, unit: SampleUnit) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


@final
class PlainConsole(Console):
    """Plain lines on standard output: a line an epoch, and one every ten seconds between."""

    def __init__(self, *, has_header: bool = False) -> None:
        self._last_s = monotonic()
        self._table = EpochTable(has_header=has_header)

    def say(self, line: str) -> None:
        """Print the line."""
        _print(line, is_ours=False)

    def warn(self, line: str) -> None:
        """Print the line."""
        _print(line)

    def is_due(self) -> bool:
        """Tell whether nothing was printed for ten seconds."""
        return monotonic() - self._last_s >= _PLAIN_EVERY_S

    def advance(self, advance: Advance) -> None:
        """Print the progress if none was printed for ten seconds."""
        if self.is_due():
            place = f"epoch {advance.epoch}/{advance.epochs}  {advance.position()}"
            self.say(f"{place}  {advance.text()}")
            self._last_s = monotonic()

    def evaluating(self, what: str, done: int, total: int) -> None:
        """Print the progress if none was printed for ten seconds."""
        if self.is_due():
            self.say(f"{what}  {_batches(done, total)}")
            self._last_s = monotonic()

    def epoch(self, row: EpochRow, unit: SampleUnit) -> None:
        """Print the row, under a header the first time."""
        for line in self._table.lines(row, unit):
            self.say(line)
        self._last_s = monotonic()

    def close(self) -> None:
        """Nothing is left open."""


@final
class BarConsole(Console):
    """A live progress line on the terminal; the finished rows scroll up above it.

    The log file gets the rows and lines, not the bar.
    """

    def __init__(self, log: Path, *, has_header: bool = False) -> None:
        self._log = log
        self._progress: Progress | None = None
        self._table = EpochTable(has_header=has_header)
        self._logged = EpochTable(has_header=has_header)
        self._open = ""
        """The figures of an epoch that hasn't ended."""
        self._widths = dict(_USUAL_WIDTHS)
        """The most columns that each figure has had: those behind it stay where they are."""

    def say(self, line: str) -> None:
        """Print the line above the bar and into the log; long labelled lines in their column."""
        self._say(line)

    def _say(self, line: str, *, is_ours: bool = False) -> None:
        self._print_above(line, is_ours=is_ours)
        self._log_line(line)

    def _print_above(self, line: str, style: str | None = None, *, is_ours: bool = False) -> None:
        with suppress(OSError):  # the terminal is gone
            console = self._bar().console
            shown = fitted(printable(line), console.width, prose=is_ours)
            console.print(shown, style=style, markup=False, highlight=False, soft_wrap=True)

    def _log_line(self, line: str) -> None:
        with suppress(OSError), self._log.open("a") as file:  # a full disk must not end a training
            file.write(line + "\n")

    def warn(self, line: str) -> None:
        """Print the line above the bar, its words wrapped, and into the log."""
        self._say(line, is_ours=True)

    def is_due(self) -> bool:
        """Always."""
        return True

    def advance(self, advance: Advance) -> None:
        """Redraw the bar."""
        for name, text in advance.figures().items():
            self._widths[name] = max(len(text), self._widths.get(name, 0))
        plain = self._is_plain()
        self._open = advance.bar_line(self._room(), plain=plain, widths=self._widths)
        self._show(self._open)

    def evaluating(self, what: str, done: int, total: int) -> None:
        """Draw a bar of the evaluation in place of the training's."""
        drawn = f"{bar(_MOST_BAR, done, total, plain=self._is_plain())} " if total else ""
        shown = f"{what} {drawn}{_batches(done, total)}"
        fits = len(shown) <= self._room()
        self._show(shown if fits else f"{what} {_batches(done, total)}")

    def epoch(self, row: EpochRow, unit: SampleUnit) -> None:
        """Print the row, under a header the first time."""
        self._open = ""
        *header, line = self._table.lines(row, unit, self._bar().console.width)
        for title in header:
            self._print_above(title, style="bold cyan")
        self._print_above(line)
        for full in self._logged.lines(row, unit):
            self._log_line(full)

    def close(self) -> None:
        """Remove the progress bar; its last line stays if the epoch was stopped."""
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], visible=False)
            if self._open:
                self._say(self._open)
            self._progress.stop()
            self._progress = None

    def _show(self, line: str) -> None:
        progress = self._bar()
        progress.update(progress.task_ids[0], visible=True, description=line)

    def _room(self) -> int:
        """Columns of the progress line: behind it the `^C` of a Ctrl-C must not begin another."""
        return self._bar().console.width - len("^C")

    def _is_plain(self) -> bool:
        return not self._bar().console.encoding.startswith("utf")

    def _bar(self) -> "Progress":
        if self._progress is None:
            from rich.console import Console as RichConsole
            from rich.progress import Progress, TextColumn

            self._progress = Progress(
                TextColumn("{task.description}", style="cyan", markup=False),
                console=RichConsole(file=sys.__stdout__),
                redirect_stdout=False,
                redirect_stderr=False,
                transient=True,
            )
            self._progress.add_task("", visible=False)
            self._progress.start()
        return self._progress


def make_console(
    kind: Literal["auto", "bar", "plain", "off"], rank: int, log: Path, *, restarted: bool = False
) -> Console:
    """Choose how to show a training on this worker.

    Args:
        kind: What the user wants.
        rank: All but 0 show nothing.
        log: This worker's log, for lines that don't pass standard output.
        restarted: The table has been begun on this screen already.
    """
    if rank != 0 or kind == "off":
        return SilentConsole()
    terminal = sys.__stdout__ is not None and sys.__stdout__.isatty()
    if kind == "bar" or (kind == "auto" and terminal):
        return BarConsole(log, has_header=restarted)
    return PlainConsole(has_header=restarted)


def _print(line: str, *, is_ours: bool = True) -> None:
    with suppress(OSError, ValueError):  # full, left by its reader, closed: the training goes on
        print(fitting(printable(line), sys.stdout, prose=is_ours), flush=True)


def _batches(done: int, total: int) -> str:
    return f"{done:>{len(str(total))}}/{total}" if total else f"batch {done}"


def _whole(share: float) -> str:
    """Write a share in whole percent, always as wide as `12 %`, since its line is redrawn."""
    return f"{min(100.0, 100 * share):2.0f} %"


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:.2f}"


_COLUMNS: Mapping[str, tuple[str, int, Callable[[float], str]]] = {
    # column: heading, width, how it is written; together they fit a terminal of 80 columns
    "epoch": ("epoch", 5, "{:d}".format),
    "step": ("step", 7, "{:d}".format),
    "time_s": ("time", 7, format_clock),
    "train_loss": ("loss", 7, show_loss),
    "train_accuracy": ("acc %", 6, _percent),
    "val_loss": ("val loss", 8, show_loss),
    "val_accuracy": ("val acc %", 9, _percent),
    "val_top5_accuracy": ("top-5 %", 7, _percent),
    "lr": ("lr", 7, show_rate),
    "images_per_s": ("", 7, "{:,.0f}".format),
}


_LEFT_OUT = tuple("val_top5_accuracy step lr time_s train_accuracy images_per_s val_loss".split())
"""Columns that a narrow terminal goes without, one after the other."""


@final
class EpochTable:
    """The table of epochs, line by line; a figure that an epoch lacks leaves its column empty."""

    def __init__(self, *, has_header: bool = False) -> None:
        """Create the epoch table.

        Args:
            has_header: The header is on the screen already, from before a restart.
        """
        self._columns: set[str] = set()
        self._shown: list[str] = []
        self._has_header = has_header

    def lines(self, row: EpochRow, unit: SampleUnit, width: float = math.inf) -> list[str]:
        """Write a row, under a header the first time and where it has other columns.

        Args:
            row: The epoch's figures.
            unit: What samples are called.
            width: Columns of the terminal, so that the least important figures are left out.
        """
        self._columns |= {name for name in _COLUMNS if getattr(row, name) is not None}
        shown = [name for name in _COLUMNS if name in self._columns]
        for name in _LEFT_OUT:
            if name in shown and len(_table_line(shown, unit, None)) > width:
                shown.remove(name)
        header: list[str] = []
        if shown != self._shown:
            self._shown = shown
            header = [] if self._has_header else [_table_line(shown, unit, None)]
            self._has_header = False
        return [*header, _table_line(shown, unit, row)]


def _table_line(columns: Sequence[str], unit: SampleUnit, row: EpochRow | None) -> str:
    """Write an epoch's figures, or without one the headings."""
    cells = []
    for name in columns:
        title, width, write = _COLUMNS[name]
        title = title or _PER_S[unit]
        value = None if row is None else getattr(row, name)
        shown = "" if value is None else write(value)
        cells.append(f"{title if row is None else shown:>{max(width, len(title))}}")
    return " ".join(cells)
