"""How a run ended, in one plain sentence."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from paceline.launch.errors.failures import WorkerFailure
from paceline.options.durations import format_duration
from paceline.options.figures import plural, show_short_percent
from paceline.options.shell import command_line
from paceline.results.json_object import number, section, text, whole

if TYPE_CHECKING:  # every command imports this module
    from paceline.report.load_run import RunReport

_OVER_S, _OVER = 0.5, 0.02
"""A time budget is kept where it isn't exceeded by more than this, or by this share of it."""
_CLOSING = {
    "evaluation_s": "the last evaluation",
    "test_s": "evaluating on the test set",
    "snapshot_s": "the last snapshot",
}


RunState = Literal["running", "finished", "stopped", "failed", "died"]
"""State of a run: `stopped` by a signal, in order; `died` without a record."""


def find_state(report: "RunReport") -> RunState:
    """Find a run's state: by its summary, else by whether a process owns it."""
    if report.summary:
        return "stopped" if text(report.summary, "stopped_because") == "signal" else "finished"
    if report.locked:
        return "running"
    return "failed" if report.failures else "died"


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """How a run ended."""

    state: Literal["finished", "interrupted", "failed", "running"]
    sentence: str
    resume: str
    """The command that goes on from the newest snapshot; empty where there is none or no need."""


def describe_ending(report: "RunReport") -> RunOutcome:
    """Say how a run ended: its summary counts first, then its failures; else whether it runs."""
    usable = any(not snapshot.damaged for snapshot in report.snapshots)
    resume = command_line("resume", report.path) if usable else ""
    if report.summary:
        reason = text(report.summary, "stopped_because")
        if reason == "signal":
            sentence = f"interrupted by a signal{_where(report)}"
            return RunOutcome(state="interrupted", sentence=sentence, resume=resume)
        return RunOutcome(state="finished", sentence=_finish(report, reason), resume="")
    if report.failures:
        sentence = f"failed: {describe_failure(report.failures[0])}"
        return RunOutcome(state="failed", sentence=sentence, resume=resume)
    # No summary, no failure, no owner: something has killed the launcher.
    if not report.locked:
        sentence = f"interrupted without a word (its launcher was killed), {_done(report)}"
        return RunOutcome(state="interrupted", sentence=sentence, resume=resume)
    sentence = f"still running when this page was written, {_done(report)}"
    return RunOutcome(state="running", sentence=sentence, resume=resume)


def describe_failure(failure: WorkerFailure) -> str:
    """Name rank, host, step, operation and error in one line."""
    host = f" on host {failure.host}" if failure.host else ""
    step = "" if failure.step is None else f" at step {failure.step:,}"
    operation = f", in {failure.operation}" if failure.operation else ""
    first_line = failure.message.strip().partition("\n")[0]
    error = ": ".join(part for part in (failure.error_type, first_line) if part)
    return f"rank {failure.rank}{host}{step}{operation}: {error or 'no error was recorded'}"


def describe_exceeded(budget: object) -> str:
    """Say by how much a time budget was exceeded, and by what; nothing where it was kept.

    Args:
        budget: `time_budget` of `summary.json`.
    """
    if not isinstance(budget, dict):
        return ""
    times = {n: float(v) for n, v in budget.items() if isinstance(v, int | float)}
    over_s = times.get("used_s", 0.0) - times.get("budget_s", 0.0)
    if over_s < max(_OVER_S, _OVER * times.get("budget_s", 0.0)):
        return ""
    parts = {what: times.get(name, 0.0) for name, what in _CLOSING.items()}
    longest = sorted((s, what) for what, s in parts.items() if s >= _OVER_S)[::-1]
    took = [f"{what} took {format_duration(seconds)}" for seconds, what in longest]
    kept = f"{format_duration(times.get('kept_back_s', 0.0))} had been kept back for the end"
    return f"exceeded by {format_duration(over_s)}: {', '.join([*took, kept])}"


def _finish(report: "RunReport", reason: str) -> str:
    settings = section(report.run, "settings")
    if reason == "epochs":
        return f"finished {_epochs(report)}"
    # Parts of a sentence, empty where the setting that they quote wasn't given.
    target = number(settings, "target_accuracy")
    patience = whole(settings, "patience")
    stopping = whole(settings, "early_stopping")
    budget = text(settings, "time_budget")
    held = f" {patience:,} epochs in a row" if patience and patience > 1 else ""
    without_gain = f" for {plural(stopping, 'epoch')}" if stopping else ""
    exceeded = describe_exceeded(report.summary.get("time_budget"))
    exceeded = f", {exceeded}" if exceeded else ""
    accuracy = f" {show_short_percent(target)}" if target else ""
    if reason == "target":
        return f"target accuracy{accuracy} reached{held}, after {_epochs(report)}"
    reasons = {
        "patience": f"no better validation result{without_gain}",
        "script": "the script's loop is over",
        "time": f"time budget{f' of {budget}' if budget else ''} used{exceeded}",
    }
    return f"stopped after {_epochs(report)}: {reasons.get(reason, reason or 'no reason recorded')}"


def _epochs(report: "RunReport") -> str:
    planned = whole(section(report.run, "settings"), "epochs")
    done = report.epochs_done
    if planned is None:
        return plural(done, "epoch")
    return f"all {plural(done, 'epoch')}" if done == planned else f"{done:,} of {planned:,} epochs"


def _where(report: "RunReport") -> str:
    step = whole(report.summary, "steps")
    if step is None:
        return ""
    per_epoch = whole(section(report.run, "derived"), "steps_per_epoch")
    epoch = f" in epoch {step // per_epoch + 1:,}," if per_epoch else ""
    return f"{epoch} at step {step:,}"


def _done(report: "RunReport") -> str:
    planned = whole(section(report.run, "settings"), "epochs")
    done, reached = len(report.metrics), report.steps.last("step")
    of_all = f"{done:,} of {planned:,} epochs done" if planned else f"{plural(done, 'epoch')} done"
    is_within = reached is not None and reached > (report.metrics.last("step") or 0)
    return f"{of_all}, step {reached:,.0f} reached" if is_within else of_all
