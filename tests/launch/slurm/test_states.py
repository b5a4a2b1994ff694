"""What Slurm says of a job, and the exit codes that follow."""

import pytest

from paceline.errors import ExitCode
from paceline.launch.restart_policy import RestartBudget
from paceline.launch.slurm.batch import decide_requeue
from paceline.launch.slurm.commands import one_line
from paceline.launch.slurm.states import (
    JobState,
    code_of,
    code_of_step,
    parse_accounted,
    parse_job,
    why_ended,
)

SHOWN = (  # Slurm 22.05
    "JobId=6 JobName=paceline-digits UserId=root(0) GroupId=root(0) MCS_label=N/A "
    "Priority=4294901754 Nice=0 Account=(null) QOS=(null) JobState=RUNNING Reason=None "
    "Dependency=(null) Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 ExitCode=0:0 "
    "RunTime=00:00:27 Comment=JobState=COMPLETED Requeue=0 \n"
)
RUNNING = JobState(state="RUNNING", may_requeue=True)


def test_a_job_as_slurm_shows_it() -> None:
    assert parse_job(SHOWN) == JobState(state="RUNNING", may_requeue=True, restarts=2)
    waiting = parse_job("JobState=PENDING Reason=Resources Requeue=0 Restarts=0 ExitCode=0:0")
    assert waiting == JobState(state="PENDING", reason="Resources")
    assert waiting.waits
    assert parse_job("No jobs in the system") is None


def test_a_job_as_accounting_knows_it() -> None:
    assert parse_accounted("CANCELLED by 0|0:15\n") == JobState(state="CANCELLED", signal=15)
    assert parse_accounted("\n") is None


@pytest.mark.parametrize(
    ("state", "code"),
    [
        (JobState(state="COMPLETED"), 0),
        (JobState(state="FAILED", exit_code=65), 65),
        (JobState(state="FAILED", exit_code=2), 2),
        (JobState(state="FAILED", exit_code=75), 75),
        (JobState(state="FAILED", exit_code=127), 70),
        (JobState(state="FAILED", exit_code=65, signal=53), 70),
        (JobState(state="FAILED"), 70),
        (JobState(state="CANCELLED", signal=15), 75),
        (JobState(state="TIMEOUT"), 75),
        (JobState(state="PREEMPTED"), 75),
        (JobState(state="NODE_FAIL"), 70),
        (JobState(state="OUT_OF_MEMORY"), 70),
        (JobState(state="SOMETHING_NEW"), 70),
    ],
)
def test_exit_codes(state: JobState, code: int) -> None:
    assert code_of(state) == code


@pytest.mark.parametrize(
    ("srun", "code"),
    [(0, 0), (2, 2), (65, 65), (75, 75), (137, 70), (1, 70), (143, 75), (-15, 75), (-9, 70)],
)
def test_exit_codes_of_a_step(srun: int, code: int) -> None:
    assert code_of_step(srun) == code


@pytest.mark.parametrize(
    ("state", "seen", "said"),
    [
        (JobState(state="FAILED", signal=53), False, "all nodes and this machine share"),
        (JobState(state="FAILED", exit_code=127), True, "its node has no /py"),
        (JobState(state="FAILED", exit_code=3), True, "exit code 3"),
        (JobState(state="TIMEOUT"), True, "--slurm-grace"),
        (JobState(state="NODE_FAIL"), True, "a node failed"),
    ],
)
def test_why_it_ended(state: JobState, seen: bool, said: str) -> None:
    assert said in why_ended(state, "/py", seen)


def test_slurms_words_in_one_line() -> None:
    said = (
        "sbatch: error: invalid partition specified: x\n"
        "sbatch: error: Batch job submission failed: Invalid partition name specified\n"
    )
    assert one_line(said) == (
        "invalid partition specified: x; "
        "Batch job submission failed: Invalid partition name specified"
    )


FULL = RestartBudget.full(2, progress=-1)
NONE_LEFT = RestartBudget(max_restarts=2, left=0, progress=40)


@pytest.mark.parametrize(
    ("code", "job", "progress", "budget", "left"),
    [
        (ExitCode.INFRASTRUCTURE, RUNNING, -1, FULL, 1),
        (ExitCode.INFRASTRUCTURE, RUNNING, 50, NONE_LEFT, 1),
        (ExitCode.RESUMABLE, RUNNING, -1, FULL, 1),
        (ExitCode.RESUMABLE, RUNNING, 50, NONE_LEFT, 2),  # told to stop: that costs nothing
        (ExitCode.RESUMABLE, RUNNING, 50, RestartBudget.full(0, -1), 0),
    ],
)
def test_queued_again(
    code: int, job: JobState, progress: int, budget: RestartBudget, left: int
) -> None:
    decision = decide_requeue(code, job, progress, budget)
    assert decision.requeue
    assert decision.budget.left == left


@pytest.mark.parametrize(
    ("code", "job", "progress", "budget", "note"),
    [
        (ExitCode.DONE, RUNNING, 50, FULL, ""),
        (ExitCode.JOB, RUNNING, 50, FULL, ""),
        (ExitCode.USAGE, RUNNING, 50, FULL, ""),
        (ExitCode.RESUMABLE, JobState(state="RUNNING"), 50, FULL, ""),  # the user has said so
        (ExitCode.RESUMABLE, JobState(state="COMPLETING", may_requeue=True), 50, FULL, ""),
        (ExitCode.RESUMABLE, None, 50, FULL, "does not answer"),
        (ExitCode.RESUMABLE, RUNNING, 40, NONE_LEFT, "without a newer snapshot"),
        (ExitCode.INFRASTRUCTURE, RUNNING, 40, NONE_LEFT, "without a newer snapshot"),
        (ExitCode.INFRASTRUCTURE, RUNNING, 40, RestartBudget.full(0, -1), "--max-restarts"),
    ],
)
def test_not_queued_again(
    code: int, job: JobState | None, progress: int, budget: RestartBudget, note: str
) -> None:
    decision = decide_requeue(code, job, progress, budget)
    assert not decision.requeue
    assert note in decision.note
    assert bool(note) == bool(decision.note)
