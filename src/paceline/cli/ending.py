"""What the user sees when a training is over: summary, or failure, and where things are."""

import json
import sys
from collections.abc import Mapping, Sequence

from paceline.config.durations import format_duration
from paceline.config.rundir import RunDirectory
from paceline.errors import ExitCode
from paceline.launch.boundary import exit_code_of
from paceline.launch.failures import WorkerFailure, one_line, render

_REASONS = {
    "epochs": "all epochs are done",
    "target": "the target accuracy is reached",
    "patience": "the validation result no longer improves",
    "time": "the time budget is used up",
    "signal": "a signal asked it to stop",
}


def announce_end(
    run: RunDirectory, *, interrupted: bool, failures: Sequence[WorkerFailure] = ()
) -> int:
    """Write the report and print the summary. Returns the exit code.

    Args:
        run: The run directory.
        interrupted: A signal asked the launcher to stop.
        failures: Of workers that didn't stop in order when they were asked to.
    """
    summary = _read_summary(run)
    ended = summary.get("stopped_because")
    if ended == "signal" or (interrupted and ended is None):
        for failure in failures:
            print(f"paceline: {one_line(failure)}", file=sys.stderr)
        if run.run_json.exists():
            _write_report(run)
        _print_interrupted(run)
        return ExitCode.RESUMABLE
    _write_report(run)
    print(_summary_text(summary, run), flush=True)
    return ExitCode.DONE


def announce_failure(
    run: RunDirectory, failures: Sequence[WorkerFailure], *, write_report: bool = True
) -> int:
    """Print the root cause, and write the report. Returns the exit code.

    An error whose message says all is told without the traceback; where nothing had been trained
    yet, it leaves no run directory behind.

    Args:
        run: The run directory.
        failures: Root cause first.
        write_report: False for workers other than the first that tell of their own failure.
    """
    cause = failures[0]
    expected = cause.kind != "infrastructure" and cause.error_type in _TOLD_WITHOUT_TRACEBACK
    if cause.error_type == "DataError" and _WRAPPED in cause.traceback:
        expected = False  # the data set's own code raised: its traceback is wanted
    text = cause.message if expected else render(failures, run.logs)
    print(f"paceline: {text}", file=sys.stderr, flush=True)
    if run.run_json.exists():
        if write_report:
            _write_report(run)
        if any(run.snapshots.glob("step-*")):
            print(
                f"Go on from the newest good snapshot: paceline resume {run.path}", file=sys.stderr
            )
    elif expected and write_report:
        run.discard()
    return exit_code_of(cause.kind)


_WRAPPED = "the direct cause of the following exception"
_TOLD_WITHOUT_TRACEBACK = (
    "UsageError",
    "DataError",
    "NonFiniteLossError",
    "JobError",
    "SnapshotError",
)
"""Errors whose message says all: a traceback through Paceline would only hide it."""


def _read_summary(run: RunDirectory) -> Mapping[str, object]:
    try:
        content = json.loads(run.summary_json.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _print_interrupted(run: RunDirectory) -> None:
    if not run.run_json.exists():
        run.discard()
        print("Stopped before the training began; nothing is left of it.", flush=True)
        return
    step = max((int(path.name[5:]) for path in run.snapshots.glob("step-" + 12 * "?")), default=0)
    what = f"It can go on from step {step}" if step else "It can start again"
    print(f"Stopped. {what}: paceline resume {run.path}", flush=True)


def _write_report(run: RunDirectory) -> None:
    from paceline.report.run import write_run_report

    try:
        write_run_report(run)
    except OSError as error:
        print(f"paceline: the report could not be written: {error}", file=sys.stderr)


def _summary_text(summary: Mapping[str, object], run: RunDirectory) -> str:
    reason = _REASONS.get(str(summary.get("stopped_because")), "it ended")
    lines = [
        f"Done: {reason}. {summary.get('epochs')} epochs, {summary.get('steps')} steps in "
        f"{format_duration(_number(summary, 'train_time_s'))}, "
        f"{_number(summary, 'images_per_s'):,.0f} images/s",
        f"  validation  {_validation(summary)}",
        f"  weights     sha256 {str(summary.get('weights_sha256'))[:16]}",
        f"  report      {run.report_html}",
        f"  evaluate    paceline evaluate {run.path}",
    ]
    return "\n".join(lines)


def _validation(summary: Mapping[str, object]) -> str:
    text = f"loss {_number(summary, 'val_loss'):.4f}"
    if summary.get("val_accuracy") is not None:
        text += f", accuracy {_number(summary, 'val_accuracy'):.2%}"
        text += f" (best {_number(summary, 'best_val_accuracy'):.2%}"
        text += f" in epoch {summary.get('best_epoch')})"
    return f"{text} on {summary.get('val_samples')} samples"


def _number(summary: Mapping[str, object], name: str) -> float:
    value = summary.get(name)
    return float(value) if isinstance(value, int | float) else float("nan")
