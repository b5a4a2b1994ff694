"""What is done about a job, by what Slurm says of it; tests/hosts/test_slurm.py has a real one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.errors import InfrastructureError
from paceline.files import write_json
from paceline.launch import follow as following
from paceline.launch.follow import follow
from paceline.launch.signals import StopRequests
from paceline.launch.slurm import commands
from paceline.launch.slurm import job as slurm_job
from paceline.launch.slurm.job import SlurmJob
from paceline.launch.slurm.script import ended_path
from paceline.launch.slurm.states import JobState
from paceline.results.run_directory import RunDirectory

RUNNING, WAITING = JobState(state="RUNNING", may_requeue=True), JobState(state="PENDING")
CANCELLED = JobState(state="CANCELLED")


class Played:
    """Plays Slurm: answers one state after another, and notes what it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *states: JobState | None) -> None:
        self._states: Iterator[JobState | None] = iter(states)
        self.requests = StopRequests()
        self.told: list[str] = []
        self.asked = 0
        self.second_at = 0
        """At which question the user asks to stop a second time; 0 for never."""
        monkeypatch.setattr(slurm_job, "_QUERY_S", (0.0, 0.0))
        monkeypatch.setattr(following, "LOOK_S", 0.0)
        monkeypatch.setattr(slurm_job, "_SETTLE_S", 0.0)
        monkeypatch.setattr(commands, "query_state", self._ask)
        monkeypatch.setattr(commands, "has_workers", lambda job_id: self.asked > 1)
        for name in ("forbid_requeue", "signal_workers", "cancel"):
            monkeypatch.setattr(commands, name, lambda job_id, name=name: self.told.append(name))

    def _ask(self, job_id: str) -> JobState | None:
        self.asked += 1
        if self.asked == self.second_at:
            self.requests.count = 2
        return next(self._states)


@pytest.fixture
def job(tmp_path: Path) -> SlurmJob:
    run = RunDirectory.named(tmp_path / "run")
    run.slurm.mkdir(parents=True)
    return SlurmJob("7", run, "/py")


def test_workers_are_told_once_there_are_any(
    job: SlurmJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = Played(monkeypatch, RUNNING, RUNNING, RUNNING, CANCELLED)
    slurm.requests.count = 1
    assert follow(job, slurm.requests) == 75
    assert slurm.told == ["forbid_requeue", "signal_workers"]


def test_a_second_signal_cancels_at_once(job: SlurmJob, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = Played(monkeypatch, RUNNING, RUNNING, RUNNING, RUNNING, CANCELLED)
    slurm.requests.count, slurm.second_at = 1, 3
    assert follow(job, slurm.requests) == 75
    assert slurm.told == ["forbid_requeue", "signal_workers", "cancel"]


def test_a_job_that_waits_is_taken_out(
    job: SlurmJob, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm = Played(monkeypatch, WAITING, CANCELLED)
    slurm.requests.count = 1
    assert follow(job, slurm.requests) == 75
    assert slurm.told == ["cancel"]
    assert "it was cancelled" in capsys.readouterr().err


def test_the_jobs_own_word_counts(
    job: SlurmJob,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    reason = JobState(state="PENDING", reason="Resources")
    slurm = Played(monkeypatch, reason, reason, RUNNING, JobState(state="FAILED", exit_code=1))
    job.output.write_text("epoch 1\n")
    write_json(ended_path(RunDirectory.named(tmp_path / "run"), "7"), {"code": 65, "restarts": 0})
    monkeypatch.setattr(slurm_job, "_SETTLE_S", 60.0)
    assert follow(job, slurm.requests) == 65
    said = capsys.readouterr()
    assert said.out == "epoch 1\n"
    assert said.err == "Job 7 waits: Resources\nJob 7 runs\n"
    assert slurm.told == []


def test_a_job_that_slurm_has_forgotten(job: SlurmJob, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = Played(monkeypatch, RUNNING, None, None)
    assert follow(job, slurm.requests) == 70


def test_one_can_leave_when_slurm_does_not_answer(
    job: SlurmJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = Played(monkeypatch)
    slurm.requests.count = 2

    def silent(job_id: str) -> JobState:
        raise InfrastructureError("Slurm does not answer: timed out")

    monkeypatch.setattr(commands, "query_state", silent)
    with pytest.raises(InfrastructureError, match="scancel 7"):
        follow(job, slurm.requests)
