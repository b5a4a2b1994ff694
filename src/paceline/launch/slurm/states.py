"""Slurm's states of a job, and the exit codes that they stand for: pure functions."""

import re
from dataclasses import dataclass

from paceline.errors import ExitCode

_ENDED = {
    "COMPLETED": ExitCode.DONE,
    "CANCELLED": ExitCode.RESUMABLE,
    "DEADLINE": ExitCode.RESUMABLE,
    "PREEMPTED": ExitCode.RESUMABLE,
    "TIMEOUT": ExitCode.RESUMABLE,
    "BOOT_FAIL": ExitCode.INFRASTRUCTURE,
    "FAILED": ExitCode.INFRASTRUCTURE,
    "NODE_FAIL": ExitCode.INFRASTRUCTURE,
    "OUT_OF_MEMORY": ExitCode.INFRASTRUCTURE,
    "REVOKED": ExitCode.INFRASTRUCTURE,
}
_WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"}
_WHY = {
    "DEADLINE": "its deadline came",
    "TIMEOUT": "its time limit came before the workers had stopped: --slurm-grace may be too short",
    "CANCELLED": "it was cancelled",
    "PREEMPTED": "a job of higher priority took its nodes",
    "NODE_FAIL": "a node failed",
    "BOOT_FAIL": "a node did not start",
    "OUT_OF_MEMORY": "it needed more memory than it had asked for (--slurm-arg=--mem=...)",
}
_OURS = {int(code) for code in ExitCode}
_FIELDS = re.compile(r"(?:^|\s)(JobState|Reason|Requeue|Restarts|ExitCode)=(\S*)")
_EXIT = re.compile(r"(\d+):(\d+)")


@dataclass(frozen=True, kw_only=True)
class JobState:
    """What Slurm says of a job."""

    state: str
    reason: str = ""
    """Why it waits; empty where Slurm names none."""
    may_requeue: bool = False
    restarts: int = 0
    exit_code: int = 0
    signal: int = 0

    @property
    def waits(self) -> bool:
        """Whether it is queued."""
        return self.state in _WAITING

    @property
    def ended(self) -> bool:
        """Whether it is over for good."""
        return self.state in _ENDED


def parse_job(text: str) -> JobState | None:
    """Read what `scontrol show job -o` prints; None where it tells of no job."""
    fields: dict[str, str] = {}
    for name, value in _FIELDS.findall(text):
        fields.setdefault(name, value)  # what the user may have written comes after these
    if "JobState" not in fields:
        return None
    reason = fields.get("Reason", "")
    code, number = _codes(fields.get("ExitCode", ""))
    return JobState(
        state=fields["JobState"],
        reason="" if reason in ("None", "(null)") else reason,
        may_requeue=fields.get("Requeue") == "1",
        restarts=int(fields.get("Restarts") or 0),
        exit_code=code,
        signal=number,
    )


def parse_accounted(text: str) -> JobState | None:
    """Read what `sacct -n -P -X -o State,ExitCode` prints; None where it knows nothing."""
    lines = [line for line in text.splitlines() if "|" in line]
    if not lines:
        return None
    state, _, codes = lines[-1].partition("|")
    code, number = _codes(codes)
    return JobState(state=state.split()[0], exit_code=code, signal=number)


def code_of(job: JobState) -> int:
    """Give the exit code for a job that ended without saying how the training did."""
    if job.state == "FAILED" and not job.signal and job.exit_code in _OURS - {0}:
        return job.exit_code
    return int(_ENDED.get(job.state, ExitCode.INFRASTRUCTURE))


def why_ended(job: JobState, python: str, output_seen: bool) -> str:
    """Say why a job may have ended that left no exit code."""
    if job.state != "FAILED":
        return _WHY.get(job.state, f"its state is {job.state}")
    if job.exit_code in (126, 127):
        return (
            f"its node has no {python}: install Paceline where all nodes see it, at the same path"
        )
    if not output_seen:
        return (
            "its node could not write the run directory: name one with --run-dir that all nodes "
            "and this machine share"
        )
    return f"its script ended with exit code {job.exit_code}, signal {job.signal}"


def code_of_step(srun_code: int) -> int:
    """Give the exit code for what srun returned: the highest of its tasks', 128 + signal."""
    # Negative: srun itself died of a signal, as subprocess reports it.
    code = 128 - srun_code if srun_code < 0 else srun_code
    if code in _OURS:
        return code
    # Workers that were told to stop before they could handle it die of the signal.
    return int(ExitCode.RESUMABLE if code == 128 + 15 else ExitCode.INFRASTRUCTURE)


def _codes(text: str) -> tuple[int, int]:
    match = _EXIT.fullmatch(text.strip())
    return (int(match[1]), int(match[2])) if match else (0, 0)
