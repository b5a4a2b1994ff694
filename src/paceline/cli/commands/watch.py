"""`paceline watch [RUN_DIR]`: follows a training in the terminal, from its files alone."""

import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import ExitCode
from paceline.launch.watchdog.stragglers import find_stragglers
from paceline.options.command_line import read_command
from paceline.options.durations import format_duration
from paceline.options.fields import option_fields, pick
from paceline.options.figures import (
    plural,
    show_loss,
    show_milliseconds,
    show_percent,
    show_rate,
    show_speed,
    show_whole_percent,
)
from paceline.options.text import aligned, printable, wrapped
from paceline.results.find_runs import RUN_OR_NAME, is_run

if TYPE_CHECKING:
    from paceline.report.live import RunFollower, RunStatus

_USAGE = "paceline watch [RUN_DIR]"
_ABOUT = (
    "Follow a training in the terminal, without RUN_DIR the newest that runs below runs/ (else the "
    "newest): where it stands, its loss, its speed, where the time goes and what each worker does, "
    "read from its files about once a second, so that it works from another shell or host. It ends "
    "with the training; Ctrl-C ends it before, and not the training. In a pipe it prints a line "
    f"for each change. {RUN_OR_NAME}"
)
_EVERY_S = 1.0
_MAX_WORKERS = 8
"""In the table, the slowest; a terminal of 24 lines has room for no more."""
_LABEL = 12
_MIN_WIDTH = 40
_OLD_S = 15.0
"""Figures that are older are said to be."""
_STYLES = {"running": "cyan", "finished": "green", "stopped": "yellow"}


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """How it is shown."""

    json: bool = False
    """Print how it stands now as one JSON object, and end."""


_OPTIONS = option_fields(WatchOptions, "Output")


def main(tokens: Sequence[str]) -> int:
    """Run the command."""
    named, given = read_command(_USAGE, _ABOUT, tokens, _OPTIONS, "the run directory")
    from paceline.report.runs.listing import newest_running, run_of_command

    run = run_of_command(named, "watch", "Watching", newest_running)
    if not (is_run(run.path) or run.is_locked()):
        run.read_run()  # says what there is instead
    from paceline.report.live import RunFollower

    follower = RunFollower(run)
    if pick(WatchOptions, given).json:
        print(json.dumps(follower.read().to_json(), indent=2))
    elif sys.stdout.isatty():
        follow_live(follower)
    else:
        follow_plainly(follower)
    return ExitCode.DONE


def follow_live(follower: "RunFollower") -> None:
    """Redraw the figures every second until the training ends; the last ones stay."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console()
    plain = not console.encoding.startswith("utf")
    with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while True:
            status = follower.read()
            lines = lines_of(status, follower.losses, console.width, plain=plain)
            shown = Text("\n".join(lines), no_wrap=True, overflow="crop")
            start = len(lines[0]) + 1  # the second line begins with the state
            shown.stylize(_STYLES.get(status.state, "red"), start, start + len(status.state))
            live.update(shown, refresh=True)
            if status.state != "running":
                return
            time.sleep(_EVERY_S)


def follow_plainly(follower: "RunFollower") -> None:
    """Print a line for each change until the training ends."""
    before: object = None
    with suppress(KeyboardInterrupt):
        while True:
            status = follower.read()
            now = (status.state, status.step, status.val_epoch, status.workers)
            if now != before:
                print(line_of(status), flush=True)
            if status.state != "running":
                return
            before = now
            time.sleep(_EVERY_S)


def line_of(status: "RunStatus") -> str:
    """Write how a run stands as one line."""
    figures = (_training(status), _validation(status))
    shown = figures if status.state == "running" else (status.sentence,)
    return printable("  ".join(filter(None, (_position(status) or "starting", *shown))))


def lines_of(status: "RunStatus", losses: Sequence[float], width: int, *, plain: bool) -> list[str]:
    """Write how a run stands as lines with a label each; what isn't known is left out.

    Args:
        losses: Of training, in the order of steps.
        plain: The terminal shows ASCII alone.
    """
    position = _position(status)
    rows = [
        (status.state, position or "starting"),
        ("loss", _curve(status, losses, max(10, width - _LABEL - 30), plain)),
        ("speed", _speed(status)),
        ("time goes to", _parts(status)),
        ("workers", _workers(status)),
        *(("", line) for line in _each_worker(status)),
        ("validation", _validation(status, prefix="")),
        ("ended", status.sentence),
        ("resume with", status.resume),
        # Files that aren't there yet are none.
        *(("problem", problem) for problem in status.problems if position),
    ]
    title = printable(f"{status.recipe or 'training'}  {status.path}")
    lines = [_fitting(title, max(width, _MIN_WIDTH))]
    for label, content in rows:
        if content:
            text = f"{label:{_LABEL}}  {printable(content)}"
            room, indent = max(width, _MIN_WIDTH), " " * (_LABEL + 2)
            # A line of the table of workers keeps its columns: it is cut, not wrapped.
            lines += wrapped(text, room, indent) if label else [f"  {printable(content)}"[:room]]
    return lines


def _fitting(title: str, width: int) -> str:
    """Cut a title from the left, since a path's end says more."""
    return title if len(title) <= width else f"...{title[len(title) - width + 3 :]}"


def _position(status: "RunStatus") -> str:
    parts = []
    if status.epoch is not None and status.epochs is not None:
        parts.append(f"epoch {status.epoch:,} of {status.epochs:,}")
    if status.step is not None:
        parts.append(f"step {status.step:,}" + (f" of {status.steps:,}" if status.steps else ""))
    if status.time_s is not None:
        took = format_duration(status.time_s)
        parts.append(f"{took} so far" if status.state == "running" else f"in {took}")
    if status.eta_s is not None:
        parts.append(f"ETA {format_duration(status.eta_s)}")
    if status.state == "running" and status.age_s is not None and status.age_s > _OLD_S:
        parts.append(f"newest figures {format_duration(status.age_s)} old")
    return ", ".join(parts)


def _training(status: "RunStatus") -> str:
    loss = "" if status.train_loss is None else f"loss {show_loss(status.train_loss)}"
    return ", ".join(filter(None, (loss, _speed(status))))


def _curve(status: "RunStatus", losses: Sequence[float], width: int, plain: bool) -> str:
    from paceline.report.charts import spans_decades
    from paceline.report.live import sparkline

    if status.train_loss is None:
        return ""
    accuracy = status.train_accuracy
    known = "" if accuracy is None else f", accuracy {show_percent(accuracy)}"
    if len(losses) < 2:
        return f"{show_loss(status.train_loss)}{known}"
    scale = " (log scale)" if spans_decades(losses) else ""
    drawn = sparkline(losses, width - len(scale), plain=plain)
    return f"{show_loss(status.train_loss)}{known}  {drawn}{scale}"


def _speed(status: "RunStatus") -> str:
    speed, lr = status.images_per_s, status.lr
    parts = [f"{show_speed(speed)} {status.sample_unit}/s"] if speed else []
    if lr is not None and status.state == "running":
        parts.append(f"lr {show_rate(lr)}")
    return ", ".join(parts)


def _parts(status: "RunStatus") -> str:
    """Say where the time of a step goes, the most first, in words for other than trainers."""
    names = {"exposed": "communication", "waiting": "waiting for the slowest"}
    if status.parts is not None:
        shares = dict(status.parts)
    else:
        known = {"exposed": status.exposed_comm, "waiting": status.waiting}
        shares = {name: share for name, share in known.items() if share is not None}
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    listed = [f"{names.get(n, n)} {show_whole_percent(s)}" for n, s in ordered if s >= 0.005]
    return ", ".join(listed)


def _workers(status: "RunStatus") -> str:
    if status.workers is None:
        return ""
    nodes = f" on {plural(status.nodes, 'node')}" if status.nodes and status.nodes > 1 else ""
    restarts = f", {plural(status.restarts, 'restart')}" if status.restarts else ""
    return f"{status.workers:,}{nodes}{restarts}"


def _each_worker(status: "RunStatus") -> Sequence[str]:
    """Lay out a table of the workers, the slowest first: what each does, and where its time goes.

    Nothing of a single worker: all of this is said above.
    """
    if len(status.speeds) < 2:
        return ()
    slow = {each.speed.rank: f"slow by {each.cause}" for each in find_stragglers(status.speeds)}
    rows: list[Sequence[str]] = [
        ("rank", "host", "step", "ms a step", "computing", "waiting", "data", "now")
    ]
    rows += [
        (
            str(speed.rank),
            printable(speed.host),
            f"{speed.step:,}",
            show_milliseconds(speed.step_s),
            *(show_whole_percent(part / speed.step_s if speed.step_s else 0.0) for part in parts),
            ", ".join(filter(None, (speed.doing, slow.get(speed.rank)))),
        )
        for speed in status.speeds[:_MAX_WORKERS]
        for parts in ((speed.compute_s, speed.waiting_s, speed.data_s),)
    ]
    left = len(status.speeds) - _MAX_WORKERS
    more = [f"and {left:,} faster ones: paceline workers"] if left > 0 else []
    return [*aligned(rows, left=(1, len(rows[0]) - 1)), *more]


def _validation(status: "RunStatus", prefix: str = "val ") -> str:
    if status.val_epoch is None:
        return ""
    parts = []
    if status.val_loss is not None:
        parts.append(f"{prefix}loss {show_loss(status.val_loss)}")
    if status.val_accuracy is not None:
        parts.append(f"{prefix}accuracy {show_percent(status.val_accuracy)}")
    best = "" if status.best_epoch is None else f", best in epoch {status.best_epoch:,}"
    return f"{', '.join(parts)} (epoch {status.val_epoch:,}{best})"
