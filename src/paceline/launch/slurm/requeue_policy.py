"""Whether a job that ended is queued again: a pure decision."""

from dataclasses import dataclass, replace

from paceline.errors import ExitCode
from paceline.launch.restart_policy import RestartBudget
from paceline.launch.slurm.states import JobState

_RETRIED = (ExitCode.INFRASTRUCTURE, ExitCode.RESUMABLE)


@dataclass(frozen=True, kw_only=True)
class RequeueDecision:
    """What becomes of the job."""

    budget: RestartBudget
    """To be kept for the next start."""
    requeue: bool = False
    note: str = ""
    """What to tell the user; may be empty."""


def decide_requeue(
    code: int, job: JobState | None, progress: int, budget: RestartBudget
) -> RequeueDecision:
    """Decide.

    A job is queued again where its workers were told to stop or the infrastructure failed, unless
    the user has said not to (then Slurm has `Requeue=0`) or Slurm is ending the job itself.

    Args:
        code: How the training ended.
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
