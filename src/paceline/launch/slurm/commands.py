"""Calls Slurm's own commands (sbatch, scontrol, sacct, scancel), and reads what they print."""

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from paceline.errors import InfrastructureError, UsageError
from paceline.launch.slurm.states import JobState, parse_accounted, parse_job

_LIMIT_S = 120.0
_PREFIX = re.compile(r"^\w+: (?:error|fatal): ", re.MULTILINE)
_ABSENT = re.compile(r"unable to contact|timed out|temporarily|connection refused", re.IGNORECASE)
_GONE = re.compile(r"invalid job id", re.IGNORECASE)
_STEP = re.compile(r"\d+\.\d+\s*$", re.MULTILINE)
_NUMBER = re.compile(r"(\d+)(?:;\S+)?")


def submit_script(options: Sequence[str], script: str, environment: Mapping[str, str]) -> str:
    """Submit a script.

    Args:
        environment: Of sbatch, which hands it on to the job.

    Returns:
        The job's number.

    Raises:
        UsageError: Slurm refuses the job, or isn't there; its own words are passed on.
        InfrastructureError: Slurm does not answer.
    """
    done = _run(["sbatch", "--parsable", *options, script], environment)
    match = _NUMBER.fullmatch(done.stdout.strip().splitlines()[-1]) if done.stdout.strip() else None
    if done.returncode == 0 and match:
        return match[1]
    message = one_line(done.stderr) or f"sbatch ended with exit code {done.returncode}"
    if _ABSENT.search(message):
        raise InfrastructureError(f"Slurm does not answer: {message}")
    raise UsageError(f"Slurm refuses the job: {message}")


def query_state(job_id: str) -> JobState | None:
    """Ask for a job's state.

    Returns:
        None where Slurm doesn't know the job any more.

    Raises:
        InfrastructureError: Slurm does not answer.
    """
    done = _run(["scontrol", "show", "job", "--oneliner", job_id])
    if done.returncode == 0 and (job := parse_job(done.stdout)):
        return job
    if not _GONE.search(done.stderr):
        raise InfrastructureError(f"Slurm does not answer: {one_line(done.stderr)}")
    if shutil.which("sacct") is None:
        return None
    return parse_accounted(
        _run(["sacct", "-n", "-P", "-X", "-j", job_id, "-o", "State,ExitCode"]).stdout
    )


def has_workers(job_id: str) -> bool:
    """Tell whether a job's workers have been started: whether it has a step of tasks."""
    return (
        _STEP.search(_run(["squeue", "--steps", "-h", "-j", job_id, "-o", "%i"]).stdout) is not None
    )


def forbid_requeue(job_id: str) -> None:
    """Let neither Slurm nor the job's own script queue it again."""
    _run(["scontrol", "update", f"JobId={job_id}", "Requeue=0"])


def signal_workers(job_id: str) -> None:
    """Send SIGTERM to the workers, and not to the script."""
    _run(["scancel", "--signal=TERM", job_id])


def cancel(job_id: str) -> None:
    """End a job, or take it out of the queue."""
    _run(["scancel", job_id])


def requeue(job_id: str) -> str:
    """Queue a running job again, from within. Returns what Slurm objects; empty for nothing."""
    done = _run(["scontrol", "requeue", job_id])
    if done.returncode <= 0:  # killed: Slurm has queued the job, and ends all that is left of it
        return ""
    return one_line(done.stderr or done.stdout) or "no reason given"


def one_line(text: str) -> str:
    """Put a command's output into one line."""
    return "; ".join(line.strip() for line in _PREFIX.sub("", text).splitlines() if line.strip())


def _run(
    command: Sequence[str], environment: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a command that a signal of the terminal doesn't reach.

    Raises:
        UsageError: It isn't here.
        InfrastructureError: It doesn't end.
    """
    try:
        return subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT_S,
            start_new_session=True,
            check=False,
        )
    except FileNotFoundError:
        raise UsageError(
            f"there is no {command[0]} here: --on slurm works on a login node of a Slurm cluster, "
            "or another machine that has Slurm's commands"
        ) from None
    except subprocess.TimeoutExpired:
        raise InfrastructureError(
            f"Slurm does not answer: {command[0]} took more than {_LIMIT_S:g} s"
        ) from None
