"""The script of a Slurm job: runs the workers, notes how they ended, queues the job again.

Run on the first node: `python -P -m paceline.launch.slurm.batch RUN_DIR MAX_RESTARTS srun ...`.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from paceline.errors import ExitCode, PacelineError
from paceline.files import read_json, write_json
from paceline.launch.errors.error_records import (
    exit_code_of,
    forget_failures,
    read_failures,
    set_aside,
)
from paceline.launch.errors.failures import one_line, root_cause
from paceline.launch.restart_policy import RestartBudget
from paceline.launch.slurm import commands
from paceline.launch.slurm.script import budget_path, ended_path
from paceline.launch.slurm.states import JobState, code_of_step
from paceline.options.fields import read_dataclass
from paceline.results.run_directory import RunDirectory

_RETRIED = (ExitCode.INFRASTRUCTURE, ExitCode.RESUMABLE)


@dataclass(frozen=True, kw_only=True)
class RequeueDecision:
    """What becomes of the job."""

    budget: RestartBudget
    """To be kept for the next start."""
    requeue: bool = False
    note: str = ""
    """A message for the user; may be empty."""


def decide_requeue(
    code: int, job: JobState | None, progress: int, budget: RestartBudget
) -> RequeueDecision:
    """Decide.

    A job is queued again where its workers were told to stop or the infrastructure failed, unless
    the user has said not to (then Slurm has `Requeue=0`) or Slurm is ending the job itself.

    Args:
        job: What Slurm says of the job now; None where it doesn't answer.
        progress: Step of the newest snapshot; -1 for none.
        budget: Starts that are left without a newer snapshot.
    """
    if code not in _RETRIED:
        return RequeueDecision(budget=budget)
    if job is None:
        return RequeueDecision(
            budget=budget, note="Slurm does not answer, so the job is not queued again"
        )
    # Slurm is ending the job itself, or the user has forbidden another start.
    if job.state != "RUNNING" or not job.may_requeue:
        return RequeueDecision(budget=budget)
    if code == ExitCode.RESUMABLE and progress > budget.progress:
        # Told to stop, not failed: that costs nothing as long as the training gets on.
        refilled = replace(budget, left=budget.max_restarts, progress=progress)
        return RequeueDecision(budget=refilled, requeue=True)
    spent = budget.spend("infrastructure", progress)
    if spent is None:
        note = (
            f"Not queued again: {budget.max_restarts} restarts (--max-restarts) were made without "
            "a newer snapshot"
        )
        return RequeueDecision(budget=budget, note=note)
    return RequeueDecision(budget=spent, requeue=True)


def main(argv: Sequence[str]) -> int:
    """Run the job's workers to their end. Returns the exit code."""
    directory, max_restarts, *command = argv
    run, job_id = RunDirectory.named(directory), os.environ["SLURM_JOB_ID"]
    restarts = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # srun has got it as well, ends the workers and then itself; there is something left to do.
        signal.signal(number, lambda number, frame: None)
    # Run the workers; records of earlier starts mustn't speak for this one.
    if restarts:
        set_aside(run.logs, f"attempt-{restarts - 1}")
    else:
        forget_failures(run.logs)
    budget = read_budget(budget_path(run, job_id), run, int(max_restarts))
    code = run_workers(command, run.logs)
    # Queue the job again, or leave the final exit code for the command that follows it.
    decision = decide_requeue(code, _state(job_id), run.newest_step(), budget)
    if decision.requeue:
        decision = _requeued(decision, budget_path(run, job_id), job_id)
    if decision.note:
        print(f"paceline: {decision.note}", file=sys.stderr, flush=True)
    if not decision.requeue:
        with suppress(OSError):  # who waits then goes by the job's own exit code
            write_json(ended_path(run, job_id), {"code": code, "restarts": restarts})
    return code


def read_budget(path: Path, run: RunDirectory, max_restarts: int) -> RestartBudget:
    """Read how many restarts are left; all of them where this is the job's first start."""
    with suppress(OSError, ValueError):
        return read_dataclass(RestartBudget, read_json(path), strict=True)
    return RestartBudget.full(max_restarts, run.newest_step())


def run_workers(command: Sequence[str], logs: Path) -> int:
    """Run srun to its end, and give the exit code of what was the cause of it."""
    code = code_of_step(subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode)
    failures = root_cause(read_failures(logs))
    if code == ExitCode.DONE or not failures:
        return code
    cause = failures[0]
    print(f"paceline: the training failed on {one_line(cause)}", file=sys.stderr, flush=True)
    return int(exit_code_of(cause.kind))


def _requeued(decision: RequeueDecision, path: Path, job_id: str) -> RequeueDecision:
    """Queue the job again, the count of restarts first."""
    try:
        # Before the requeue, which may kill this process at once.
        write_json(path, asdict(decision.budget))
        objection = commands.requeue(job_id)
    except (OSError, PacelineError) as error:
        objection = str(error)
    if objection:
        return RequeueDecision(
            budget=decision.budget, note=f"the job can't be queued again: {objection}"
        )
    print("Queued again: the training resumes from its newest snapshot.", flush=True)
    return decision


def _state(job_id: str) -> JobState | None:
    try:
        return commands.query_state(job_id)
    except PacelineError:
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
