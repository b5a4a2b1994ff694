"""Failures of workers: what is known of each, which is the root cause, and how users are told."""

import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from paceline.launch.errors.device_errors import device_error
from paceline.launch.errors.mismatch import (
    DIFFERENT_COLLECTIVES,
    describe_place,
    explain,
    is_mismatch,
)
from paceline.launch.errors.python_stacks import main_thread, without_launcher
from paceline.options.fields import read_dataclass
from paceline.results.run_directory import log_path

FailureKind = Literal["usage", "job", "infrastructure"]
"""Who is at fault: the command, where nothing has begun; the user's code, data or settings; or the
world outside."""
EndedBy = Literal["itself", "launcher", "fork server"]

_LOST_PEER_TYPES = {"DistBackendError", "DistNetworkError", "DistStoreError", "DistError"}
_LOST_PEER = re.compile(
    r"connection (closed by peer|reset|refused|aborted)|broken pipe|socket (timeout|error|closed)"
    r"|timed out waiting|timed out after \d|application timeout caused pair closure"
    r"|connectfullmesh failed|third_party/gloo|gloo/transport|\bnccl\b|store->|tcpstore"
    r"|failed to recv|failed to send",
    re.IGNORECASE,
)
_CRASHES = {"SIGKILL", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL"}
_LINE_LIMIT = 200
_LOST = 5
"""The place of lost peers in the order of causes: the last."""


@dataclass(frozen=True, kw_only=True)
class WorkerFailure:
    """How one worker failed."""

    rank: int
    host: str
    step: int | None = None
    """The step it was in, where it got that far."""
    exit_code: int | None = None
    signal_name: str | None = None
    """The signal that ended it, such as SIGKILL."""
    kind: FailureKind
    error_type: str = ""
    """Name of the exception's type; empty where a signal ended the worker."""
    message: str
    traceback: str = ""
    """The whole traceback; for a crash, what the fault handler wrote."""
    operation: str = ""
    """What it was doing, such as `backward`; empty where unknown."""
    time_s: float | None = None
    """When, in seconds since the epoch by that host's clock."""
    is_hang: bool = False
    """Whether it was ended because the training didn't go on."""
    worth_restart: bool = True
    """Whether starting again here at once may help: a disk that is full or read-only stays so."""

    def to_json(self) -> dict[str, object]:
        """Give the fields as a JSON object."""
        return asdict(self)

    @staticmethod
    def from_json(content: object) -> "WorkerFailure":
        """Read what `to_json` gave.

        Raises:
            ValueError: It isn't a failure record.
        """
        try:
            return read_dataclass(WorkerFailure, content, strict=True)
        except ValueError as error:
            raise ValueError(f"not a failure record: {error}") from error


def is_lost_peer(error_type: str, text: str) -> bool:
    """Whether an error only says that another worker, or the link to it, went away."""
    is_lost = error_type in _LOST_PEER_TYPES or _LOST_PEER.search(text) is not None
    return is_lost and not is_mismatch(text)  # Gloo's words for that have its own file in them


def root_cause(failures: Iterable[WorkerFailure]) -> tuple[WorkerFailure, ...]:
    """Order failures so that the cause stands first and its consequences after it.

    A worker that dies breaks its peers' connections, and theirs may be noticed first: so what
    happened to a worker decides, and time only between failures of one sort.

    Returns:
        All failures: workers that met in different collectives, since what one of them received
        there may have broken it in any way; then crashes by signal, then errors of the job, then
        silent exits and aborts (NCCL aborts a worker whose peer went away), then other
        infrastructure errors, then lost peers.
    """
    return tuple(sorted(failures, key=_causality))


def _causality(failure: WorkerFailure) -> tuple[int, float, int]:
    when = failure.time_s if failure.time_s is not None else float("inf")
    return (_sort_of(failure), when, failure.rank)


def _sort_of(failure: WorkerFailure) -> int:
    if _is_mismatch(failure):
        return 0
    if failure.signal_name in _CRASHES:
        return 1
    if failure.kind != "infrastructure":
        return 2
    if not failure.error_type:
        return 3
    of_worker = device_error(failure.message) is not None  # also where NCCL was the first to see it
    is_lost = is_lost_peer(failure.error_type, failure.traceback or failure.message)
    return _LOST if is_lost and not of_worker else 4


@dataclass(frozen=True, kw_only=True)
class WorkerExits:
    """How the workers of one attempt ended, as far as the launcher can see."""

    exit_codes: Mapping[int, int | None]
    """By rank; negative for a signal, None where unknown."""
    first: int | None
    """The rank whose end was noticed first."""
    stopped: frozenset[int]
    """Ranks that the launcher killed because they didn't end in time."""
    pids: Mapping[int, int] = field(default_factory=dict)
    """Process ids by rank."""
    stop_requested: bool = False
    """Whether the user asked to stop, so that all workers got SIGTERM."""


def unrecorded(
    ending: WorkerExits, recorded: Mapping[int, WorkerFailure], done: Iterable[int]
) -> dict[int, int]:
    """Find the workers that failed and could not say why.

    Args:
        recorded: Failures that workers wrote down, by rank.
        done: Ranks that delivered a result.

    Returns:
        Rank -> exit code, without the workers that the launcher itself ended: by SIGTERM, or killed
        because they didn't end after a peer failed. Those killed after a request to stop count, and
        so do those that ended with 0 before their end.
    """
    explained = set(recorded) | set(done)
    codes = {}
    for rank, code in ending.exit_codes.items():
        # What the launcher ended needs no explanation: after a request to stop, whoever died of
        # SIGTERM; otherwise the peers of the first to fail.
        if ending.stop_requested:
            ours = code == -signal.SIGTERM
        else:
            ours = rank in ending.stopped or (code == -signal.SIGTERM and rank != ending.first)
        if code is not None and rank not in explained and not ours:
            codes[rank] = code
    return codes


def silent_failure(
    rank: int,
    exit_code: int,
    *,
    host: str,
    step: int | None,
    operation: str,
    out_of_memory: bool | None,
    crash: str,
    ended_by: EndedBy = "itself",
) -> WorkerFailure:
    """Describe a worker that ended without a record: killed by a signal, or by an exit of its own.

    Args:
        exit_code: Negative for a signal.
        step: From its note.
        out_of_memory: Whether the kernel killed it for want of memory; None: it killed some process
            of this control group for that, and doesn't tell which.
        crash: What it wrote to its log as it died.
        ended_by: The launcher, because it didn't stop in time; or the end of the fork server, its
            parent: then nobody knows its exit code.
    """
    # Who ended it comes first; then how: exit code 0, another code, or a signal.
    name = signal_name(-exit_code) if exit_code < 0 else None
    if ended_by == "launcher":
        message = "did not stop in time after the signal, and was killed"
    elif ended_by == "fork server":
        message = "ended with the fork server, its parent process, which something has killed"
    elif exit_code == 0:
        message = (
            "ended its process with exit code 0 before the end of the training (os._exit(0), or "
            "something like it, in the code that it ran?)"
        )
    elif name is None:
        message = f"ended its process with exit code {exit_code} without an exception"
    elif name == "SIGKILL" and out_of_memory:
        message = "killed by SIGKILL, because the machine or the job was out of memory"
    elif name == "SIGKILL" and out_of_memory is None:
        message = (
            "killed by SIGKILL, perhaps for want of memory: the kernel has killed a process of "
            "this job for that meanwhile, and doesn't let us see which"
        )
    else:
        message = f"killed by {name}"
    # A process that aborts has often written why: NCCL's watchdog, when a kernel has failed.
    of_device = device_error(crash) if name == "SIGABRT" else None
    if of_device is not None:
        message = f"{message}: {of_device.name}"
        crash = f"{crash.rstrip()}\n{of_device.advice}\n"
    is_job = not exit_code or (of_device is not None and of_device.kind == "job")
    # Or Gloo: what came from a peer belongs to another collective.
    if name == "SIGABRT" and is_mismatch(crash):
        message, is_job = f"{message}: {DIFFERENT_COLLECTIVES}", True
        # All of the crash is in the log; its C++ exception and its threads help nobody here.
        crash = without_launcher(main_thread(crash).partition("\n\n")[0])
    return WorkerFailure(
        rank=rank,
        host=host,
        step=step,
        exit_code=exit_code,
        signal_name=name,
        # Nothing outside of the process makes it end with 0: a retry would end the same way.
        kind="job" if is_job else "infrastructure",
        message=message,
        traceback=crash,
        operation=operation,
    )


def signal_name(number: int) -> str:
    """Name a signal, `signal 77` where it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def one_line(failure: WorkerFailure) -> str:
    """Describe a failure in one line."""
    what = failure.message.strip().splitlines()
    first = what[0] if what else "no message"
    text = f"{failure.error_type}: {first}" if failure.error_type else first
    if len(text) > _LINE_LIMIT:
        text = text[: _LINE_LIMIT - 4] + " ..."
    return f"{_place(failure)}: {text}"


def render(failures: Sequence[WorkerFailure], log_dir: Path) -> str:
    """Write for the user: the root cause's traceback, a line for each other failure, the logs.

    Args:
        failures: Ordered by `root_cause`; at least one.
    """
    cause, *others = failures
    parts = [f"The training failed on {_place(cause)}."]
    if _is_mismatch(cause):
        parts.append(_explain_mismatch(failures))
        others = [other for other in others if _sort_of(other) < _LOST]
    elif cause.traceback.strip():
        parts.append(cause.traceback.strip("\n"))
        if not cause.error_type:
            parts.append(one_line(cause))
    else:
        parts[0] = f"The training failed: {one_line(cause)}"
    if others:
        parts.append("Other workers:\n" + "\n".join(f"  {one_line(other)}" for other in others))
    parts.append(f"Log of this worker: {log_path(log_dir, cause.rank)}")
    return "\n\n".join(parts)


def _is_mismatch(failure: WorkerFailure) -> bool:
    silent = not failure.error_type and DIFFERENT_COLLECTIVES in failure.message
    return failure.kind == "job" and (silent or is_mismatch(failure.message))


def _explain_mismatch(failures: Sequence[WorkerFailure]) -> str:
    """Say where each worker was: those that lost their peer, or failed by what it sent, too."""
    places = [
        describe_place(each.rank, each.host, each.step, each.operation, each.traceback)
        for each in sorted(failures, key=lambda each: each.rank)
    ]
    raised = failures[0].traceback.strip("\n") if failures[0].error_type else ""
    return "\n\n".join(filter(None, (raised, explain(places))))


def _place(failure: WorkerFailure) -> str:
    step = "" if failure.step is None else f", step {failure.step}"
    operation = f", in {failure.operation}" if failure.operation else ""
    return f"rank {failure.rank} ({failure.host}{step}{operation})"
