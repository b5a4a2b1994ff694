"""What the user sees when a training is over: summary, or failure, and where things are."""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from paceline.errors import ExitCode
from paceline.launch.errors.error_records import exit_code_of
from paceline.launch.errors.failures import WorkerFailure, one_line, render
from paceline.options.command_line import note
from paceline.options.durations import format_duration
from paceline.options.figures import plural, show_loss, show_percent
from paceline.options.shell import command_line
from paceline.options.text import above_progress, fitting, printable
from paceline.report.run_outcome import describe_exceeded
from paceline.results.run_directory import RunDirectory, sample_unit
from paceline.runtime.write_report import WriteReport, write_report

if TYPE_CHECKING:
    from paceline.launch.local.launcher import LaunchOutcome

_REASONS = {
    "patience": "the validation result no longer improves",
    "time": "the time budget is used up",
    "signal": "a signal asked it to stop",
    "script": "the script's loop is over",
}


_MIXED = "the bits come from different hardware or settings: see numerics in run.json"


def announce(
    run: RunDirectory,
    outcome: "LaunchOutcome",
    again: Sequence[str] = (),
    *,
    quiet: bool = False,
) -> int:
    """Say how a launch ended. Returns the exit code.

    Args:
        again: Options that a command to go on needs besides the run directory.
    """
    interrupted, failures = outcome.interrupted, outcome.failures
    if failures and not interrupted:
        return announce_failure(run, failures, again=again)
    if not interrupted:
        note_apart(run, list(outcome.results.values()))
    return announce_end(run, interrupted=interrupted, failures=failures, again=again, quiet=quiet)


def note_apart(run: RunDirectory, results: Sequence[str], workers: int | None = None) -> None:
    """Say so where every worker has run a script on its own, as if it were alone.

    Args:
        workers: How many there are; by default as many as results.
    """
    count = len(results) if workers is None else workers
    met = (json.loads(result).get("met") for result in results)
    if count > 1 and not run.run_json.exists() and all(each is False for each in met):
        note(
            "the script opened no paceline.session(), and made no process group: each of the "
            f"{count} workers ran all of it on its own. A session divides the work: see "
            "docs/tutorial/own-loop.md. `paceline verify` tells what a script does on several"
        )


def announce_end(
    run: RunDirectory,
    *,
    interrupted: bool,
    failures: Sequence[WorkerFailure] = (),
    write: WriteReport = write_report,
    again: Sequence[str] = (),
    quiet: bool = False,
    way_on: str = "",
) -> int:
    """Write the report and print the summary. Returns the exit code.

    Args:
        failures: Of workers that didn't stop in order when they were asked to.
        again: Options that a command to go on needs besides the run directory.
        way_on: What resumes the run; by default a command.
    """
    if not (interrupted or run.run_json.exists()):
        run.discard()  # a script that trained nothing: what there was to say, it has said
        return ExitCode.DONE
    # The summary counts: a signal that came after the end changes nothing.
    summary = _read_summary(run)
    ended = summary.get("stopped_because")
    if ended == "signal" or (interrupted and ended is None):
        for failure in failures:
            line = f"paceline: {printable(one_line(failure))}"
            print(above_progress(line), file=sys.stderr)
        _print_interrupted(run, again, way_on)  # first: whoever stopped it may kill it soon
        if run.run_json.exists():
            write(run)
        return ExitCode.RESUMABLE
    write(run)
    if not quiet:
        print(fitting(printable(_summary_text(summary, run)), sys.stdout), flush=True)
    return ExitCode.DONE


def announce_failure(
    run: RunDirectory,
    failures: Sequence[WorkerFailure],
    write: WriteReport | None = write_report,
    again: Sequence[str] = (),
) -> int:
    """Print the root cause, and write the report. Returns the exit code.

    An error whose message says all is told without the traceback; where nothing had been trained
    yet, it leaves no run directory behind.

    Args:
        failures: Root cause first.
        write: How the report is written; None for workers other than the first that tell of their
            own failure.
        again: Options that a command to go on needs besides the run directory.
    """
    cause = failures[0]
    # Is the message enough, or does the user need the traceback?
    expected = cause.kind != "infrastructure" and cause.error_type in _SHOWN_WITHOUT_TRACEBACK
    if cause.error_type == "InfrastructureError" and not run.run_json.exists():
        expected = True  # the workers didn't meet; nothing of the user's has run yet
    if cause.error_type == "StorageError":
        expected = True
    if cause.error_type == "DataError" and _WRAPPED in cause.traceback:
        expected = False  # the data set's own code raised: its traceback is wanted
    text = cause.message if expected else render(failures, run.logs)
    message = printable(f"paceline: {text}")
    print(fitting(message, sys.stderr) if expected else message, file=sys.stderr, flush=True)
    # Something was trained: report, and how to resume. Else nothing is left behind.
    if run.run_json.exists():
        if write is not None:
            write(run)
        kept = bool(again) or any(run.snapshots.glob("step-*"))  # with hosts: on them
        if kept and not _would_fail_again(cause):
            command = command_line("resume", run.path, *again)
            note(f"Resume from the newest good snapshot: {command}")
    elif expected and write is not None:
        run.discard()
    return exit_code_of(cause.kind)


def _would_fail_again(cause: WorkerFailure) -> bool:
    """Tell whether the same command would fail again: by refused settings or a script's error."""
    return cause.kind != "infrastructure" and cause.step is None


_WRAPPED = "the direct cause of the following exception"
_SHOWN_WITHOUT_TRACEBACK = (
    "UsageError",
    "DataError",
    "NonFiniteLossError",
    "JobError",
    "SnapshotError",
)
"""Errors whose message says all: a traceback through Paceline would only hide it."""


def _read_summary(run: RunDirectory) -> Mapping[str, object]:
    try:
        return run.read_summary()
    except (OSError, ValueError):
        return {}


def _print_interrupted(run: RunDirectory, again: Sequence[str], way_on: str) -> None:
    step = max(0, run.newest_step())
    if not run.run_json.exists():
        if step:
            why = f"{run.run_json} is gone. What is left: {run.snapshots}"
            _print_stopped(printable(f"Stopped. It can't be resumed: {why}"))
            return
        run.discard()
        _print_stopped("Stopped before the training began; nothing is left of it.")
        return
    what = f"Resume from step {step:,}" if step else "Start again"
    if again:  # its snapshots are on the hosts
        what = "Resume"
    command = way_on or command_line("resume", run.path, *again)
    _print_stopped(f"Stopped. {what}: {printable(command)}")


def _print_stopped(text: str) -> None:
    print(above_progress(text, sys.stdout), flush=True)


def _summary_text(summary: Mapping[str, object], run: RunDirectory) -> str:
    found = run.read_run()
    is_recipe = found.get("kind") == "recipe"
    speed = _speed(summary, sample_unit(found))
    lines = [
        f"{_how_far(summary, found, is_recipe=is_recipe)}. {_count(summary, 'step')} in "
        f"{format_duration(_number(summary, 'train_time_s'))}{speed}",
        f"  validation  {_validation(summary)}",
    ]
    # Lines for what only some trainings have.
    if "test_samples" in summary:
        lines.append(f"  test        {_test(summary)}")
    if exceeded := describe_exceeded(summary.get("time_budget")):
        lines.append(f"  time budget {exceeded}{_start(found)}")
    lines += [
        f"  weights     sha256 {str(summary.get('weights_sha256'))[:16]}",
        f"  report      {run.report_html}",
    ]
    if summary.get("mixed_numerics") is True:
        lines.append(f"  numerics    {_MIXED}")
    if is_recipe:
        lines.append(f"  evaluate    {command_line('evaluate', run.path)}")
    return "\n".join(lines)


def _how_far(summary: Mapping[str, object], found: Mapping[str, object], *, is_recipe: bool) -> str:
    """Say how many epochs are done, of how many, and why no more: a reached target is a success."""
    ended, epochs = str(summary.get("stopped_because")), summary.get("epochs")
    settings = found.get("settings")
    # Of a script no planned number of epochs is known.
    limit: object = epochs if ended == "epochs" else None
    if limit is None and is_recipe and isinstance(settings, dict):
        limit = settings.get("epochs")
    text = ""
    if epochs:
        text = f" {epochs} of {plural(limit, 'epoch')}" if isinstance(limit, int) else ""
        text = text or f" {_count(summary, 'epoch')}"
    if ended == "target":
        return f"Target accuracy reached after{text or ' no epoch'}"
    return f"Finished{text}" + ("" if ended == "epochs" else f": {_REASONS.get(ended, 'it ended')}")


def _start(found: Mapping[str, object]) -> str:
    """Say how long a training's only start took, which no budget counts."""
    history = found.get("history")
    if not isinstance(history, list) or len(history) != 1 or not isinstance(history[0], dict):
        return ""
    try:
        requested = datetime.fromisoformat(str(found.get("started_at")))
        began = datetime.fromisoformat(str(history[0].get("started_at")))
        start_s = (began - requested).total_seconds()
    except (ValueError, TypeError):
        return ""
    if start_s < 1:
        return ""
    return f". Starting took {format_duration(start_s)} more, which isn't counted"


def _speed(summary: Mapping[str, object], unit: str) -> str:
    """Give the images or samples a second, where it is known how many a step had."""
    speed = _number(summary, "images_per_s")
    return "" if math.isnan(speed) else f", {speed:,.0f} {unit}/s"


def _test(summary: Mapping[str, object]) -> str:
    text = f"loss {show_loss(_number(summary, 'test_loss'))}"
    if summary.get("test_accuracy") is not None:
        text += f", accuracy {show_percent(_number(summary, 'test_accuracy'))}"
    return f"{text} of the best model on {_count(summary, 'sample', 'test_samples')}"


def _validation(summary: Mapping[str, object]) -> str:
    if summary.get("val_samples") == 0:
        return "none: there is no validation set, or it is empty"
    accuracy, others = summary.get("val_accuracy"), summary.get("figures")
    shown = []
    if summary.get("val_loss") is not None:
        shown.append(f"loss {show_loss(_number(summary, 'val_loss'))}")
    if accuracy is not None:
        text = f"accuracy {show_percent(_number(summary, 'val_accuracy'))}"
        text += f" (best {show_percent(_number(summary, 'best_val_accuracy'))}"
        shown.append(f"{text} in epoch {summary.get('best_epoch')})")
    # Figures of the script's own, where it evaluates neither loss nor accuracy.
    if not shown and isinstance(others, dict):
        own = {n.removeprefix("val_"): v for n, v in others.items() if n.startswith("val_")}
        shown = [f"{name} {_number(own, name):.4g}" for name in own]
    if not shown:
        return "none: no epoch had an s.evaluate(...) with a result"
    return f"{', '.join(shown)} on {_count(summary, 'sample', 'val_samples')}"


def _count(summary: Mapping[str, object], noun: str, name: str = "") -> str:
    amount = summary.get(name or f"{noun}s")
    return plural(amount, noun) if isinstance(amount, int) else f"? {noun}s"


def _number(summary: Mapping[str, object], name: str) -> float:
    value = summary.get(name)
    return float(value) if isinstance(value, int | float) else float("nan")
