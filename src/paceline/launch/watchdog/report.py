"""The report of a hang: who is missing, and where every worker waits."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from paceline.launch.errors.failures import WorkerFailure
from paceline.launch.errors.mismatch import REMEDY
from paceline.launch.errors.python_stacks import own_frame, without_launcher
from paceline.launch.watchdog.hang_detector import Hang
from paceline.launch.watchdog.worker_state import WorkerState

_ADVICE = "Where a step may rightly last so long, say --hang-after-s."


def render(hang: Hang, states: Sequence[WorkerState], stacks: Mapping[int, str]) -> str:
    """Write the report: the missing workers with their stacks, the others in a line each.

    Args:
        stacks: By rank; those that could answer.
    """
    missing = [state for state in states if state.rank in hang.missing]
    others = [state for state in states if state.rank not in hang.missing]
    parts = [_opening(hang)]
    for state in missing:
        parts.append(f"Missing is {describe(state)}, {hang.reason}{_where(state, stacks)}")
        parts.append(without_launcher(stacks.get(state.rank, "")) or _silence(state))
    if others:
        title = "These wait:" if missing else f"{hang.reason[:1].upper()}{hang.reason[1:]}:"
        lines = [f"  {describe(state)}{_where(state, stacks)}" for state in others]
        parts.append("\n".join((title, *lines)))
    parts.append(REMEDY if hang.is_mismatch else _ADVICE)
    return "\n".join(parts)


def all_stacks(states: Sequence[WorkerState], stacks: Mapping[int, str]) -> str:
    """Write every worker's state with its whole stacks, for the file of a hang."""
    return "\n\n".join(
        f"{describe(state)}\n{stacks.get(state.rank, '') or _silence(state)}" for state in states
    )


def write_report(
    path: Path, hang: Hang, states: Sequence[WorkerState], stacks: Mapping[int, str]
) -> str:
    """Write the report with all stacks to a file; give what the user is shown."""
    shown = render(hang, states, stacks)
    with suppress(OSError):  # a full disk must not keep a hang from being ended
        path.write_text(f"{shown}\n\n{all_stacks(states, stacks)}\n")
    return f"{shown}\nAll stacks: {path}"


def describe(state: WorkerState) -> str:
    """Say who a worker is, and what it was doing."""
    step = "before its first step" if state.reading.step is None else f"step {state.reading.step}"
    number = f"collective {state.reading.collectives}"
    if state.reading.collective:
        doing = f"in {number} ({state.reading.collective})"
    else:
        doing = f"in {state.reading.operation or 'no operation'}, after {number}"
    return f"{state.name}: {step}, {doing}"


def failures_of(
    hang: Hang, states: Sequence[WorkerState], stacks: Mapping[int, str]
) -> list[WorkerFailure]:
    """Make the records of a hang: of the missing workers, else of the first one.

    Args:
        stacks: By rank.
    """
    ranks = hang.missing or (states[0].rank,)
    return [
        WorkerFailure(
            rank=state.rank,
            host=state.host,
            step=state.reading.step,
            kind="job" if hang.is_mismatch else "infrastructure",
            message=f"the training hangs: {_summary(hang, state)}",
            traceback=without_launcher(stacks.get(state.rank, "")),
            operation=state.reading.collective or state.reading.operation,
            is_hang=True,
        )
        for state in states
        if state.rank in ranks
    ]


def _opening(hang: Hang) -> str:
    usual = "" if hang.usual_s is None else f" (the usual step takes {hang.usual_s:.3g} s)"
    return f"The training hangs: no progress for {hang.quiet_s:.0f} s{usual}."


def _summary(hang: Hang, state: WorkerState) -> str:
    quiet = f"for {hang.quiet_s:.0f} s"
    if not hang.missing:
        return f"{hang.reason}, {quiet}"
    return f"this worker is {hang.reason}, {quiet}, {_number(state)}"


def _number(state: WorkerState) -> str:
    return f"{'in' if state.reading.collective else 'after'} collective {state.reading.collectives}"


def _where(state: WorkerState, stacks: Mapping[int, str]) -> str:
    frame = own_frame(stacks.get(state.rank, ""))
    return f", at {frame}" if frame else ""


def _silence(state: WorkerState) -> str:
    if state.process == "running":
        return "  (no stack: it did not answer)"
    return f"  (no stack: its process is {state.process} and can't answer)"
