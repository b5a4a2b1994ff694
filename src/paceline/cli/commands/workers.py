"""`paceline workers [RUN_DIR]`: a live table of a training's workers, the slowest first."""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import ExitCode, UsageError
from paceline.launch.watchdog.stragglers import WorkerSpeed, find_stragglers, read_live
from paceline.options.command_line import read_command
from paceline.options.fields import option_fields, pick
from paceline.options.figures import plural
from paceline.options.text import printable
from paceline.results.find_runs import RUN_OR_NAME
from paceline.results.run_directory import RunDirectory

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_ABOUT = (
    "Show a running training's workers in a live table, the slowest first: where the time of a "
    "step goes, into computing, waiting for other workers, and waiting for data. Without RUN_DIR "
    "it is the newest training that runs below runs/. Ctrl-C ends the table, not the training. "
    f"{RUN_OR_NAME}"
)
_EVERY_S = 1.0


@dataclass(frozen=True, kw_only=True)
class WorkersOptions:
    """How the table is shown."""

    once: bool = False
    """Show the table once."""
    most: int = 20
    """Show at most so many workers, the slowest."""


_OPTIONS = option_fields(WorkersOptions, "Output")


def main(tokens: Sequence[str]) -> int:
    """Run the command."""
    usage = "paceline workers [RUN_DIR]"
    named, given = read_command(usage, _ABOUT, tokens, _OPTIONS, "the run directory")
    options = pick(WorkersOptions, given)
    from paceline.report.runs.listing import newest_running, run_of_command

    run = run_of_command(named, "workers", "Workers of", newest_running)
    if not run.logs.is_dir():
        raise UsageError(f"{run.path} holds no training: there is no {run.logs.name} in it")
    if options.most < 1:
        raise UsageError(f"--most is {options.most}; it must be at least 1")
    return show_once(run.logs, options.most) if options.once else show_live(run, options.most)


def show_once(log_dir: Path, most: int) -> int:
    """Print the table, or that there is none."""
    from rich.console import Console

    speeds = read_live(log_dir)
    Console().print(table_of(speeds, most) if speeds else nothing_here(log_dir), markup=False)
    return ExitCode.DONE


def show_live(run: RunDirectory, most: int) -> int:
    """Redraw the table every second until the training ends."""
    from rich.live import Live

    log_dir = run.logs
    if not (run.is_locked() or read_live(log_dir)):
        print(f"No training runs in {run.path} now.")
        return ExitCode.DONE
    with suppress(KeyboardInterrupt), Live(nothing_here(log_dir), auto_refresh=False) as live:
        while (speeds := read_live(log_dir)) or run.is_locked():
            live.update(live_view(speeds, most, log_dir), refresh=True)
            time.sleep(_EVERY_S)
    return ExitCode.DONE


def live_view(speeds: Sequence[WorkerSpeed], most: int, log_dir: Path) -> "RenderableType":
    """Draw the table, or that there is none, above an empty line.

    In that line the terminal shows Ctrl-C as ^C; behind a line as wide as the terminal it would
    begin another, and what is drawn last would leave the table's title twice.
    """
    from rich.console import Group

    return Group(table_of(speeds, most), "") if speeds else nothing_here(log_dir)


def nothing_here(log_dir: Path) -> str:
    """Say that no worker is to be seen."""
    return printable(f"No worker has finished steps in {log_dir.parent} of late.")


def table_of(speeds: Sequence[WorkerSpeed], most: int) -> "Table":
    """Draw the table.

    Args:
        speeds: The slowest first.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    slow = {straggler.speed.rank: straggler.cause for straggler in find_stragglers(speeds)}
    left = len(speeds) - most
    table = Table(
        title=f"{plural(len(speeds), 'worker')}: where a step's milliseconds go",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        caption=f"and {left} faster ones" if left > 0 else None,
    )
    table.add_column("rank", justify="right", no_wrap=True, min_width=len("rank"))
    table.add_column("host", overflow="fold", min_width=len("host"))
    for name in ("step", "steps/s", "computing", "waiting", "data"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("slow by", no_wrap=True)
    # Milliseconds, each with its share of the step; the cause where the worker is a straggler.
    for speed in speeds[:most]:
        parts = (speed.compute_s, speed.waiting_s, speed.data_s)
        table.add_row(
            str(speed.rank),
            Text(printable(speed.host)),
            f"{speed.step:,}",
            f"{1 / speed.step_s:.4g}" if speed.step_s else "",
            *(_part(part, speed.step_s) for part in parts),
            slow.get(speed.rank, ""),
        )
    return table


def _part(seconds: float, step_s: float) -> str:
    share = seconds / step_s if step_s else 0.0
    return f"{1000 * seconds:.3g} {100 * share:3.0f} %"
