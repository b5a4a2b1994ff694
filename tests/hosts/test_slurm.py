"""Trainings on a real Slurm: submitted, cancelled, preempted, failed; srun by hand.

The oracle is one undisturbed process: with --shards the final weights have the same bits.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from paceline.results.run_directory import RunDirectory
from tests.hosts.overhosts import COMMON, RECIPE, worker_on
from tests.hosts.rig import Rig
from tests.hosts.slurm import Command, Slurm, paceline
from tests.launch.waiting import until
from tests.support.needs import SLURM, need

pytestmark = [pytest.mark.hosts, pytest.mark.xdist_group("hosts")]

HOSTS = 4
_LIMIT_S = 120.0


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    need(SLURM)
    with Rig(tmp_path_factory.mktemp("rig"), HOSTS, {}) as rig:
        yield rig


@pytest.fixture(scope="module")
def slurm(rig: Rig, tmp_path_factory: pytest.TempPathFactory) -> Slurm:
    return Slurm(rig, tmp_path_factory.mktemp("slurm"))


class Training:
    """A training with gates (see recipe.py) in a directory that all hosts share."""

    def __init__(self, rig: Rig, slurm: Slurm, directory: Path) -> None:
        self._rig, self._slurm, self.directory = rig, slurm, directory
        directory.mkdir()
        self.room, self.run = directory / "room", RunDirectory.named(directory / "run")
        self.room.mkdir()

    def submit(
        self, *options: str, patch: object = None, env: Mapping[str, str] | None = None
    ) -> str:
        """Submit it. Returns the job's number."""
        file = self.directory / "patch.yaml"
        file.write_text(json.dumps(patch or {}))
        own: list[str | Path] = ["--run-dir", self.run.path, "--room", self.room]
        words = paceline("train", RECIPE, *COMMON, *own, "--on", "slurm", "--submit", *options)
        words += ["--job-patch", file]
        command = Command(self._rig, self._slurm, words, self.directory, env)
        assert command.end() == 0, command.err
        return command.job_id

    @property
    def log(self) -> str:
        return (self.run.cluster / "slurm.log").read_text()

    def reach_gate(self) -> None:
        until((self.room / "reached-0-1").exists, _LIMIT_S)

    def open_gates(self) -> None:
        (self.room / "open").touch()

    def summary(self) -> Mapping[str, object]:
        content: Mapping[str, object] = json.loads(self.run.summary_json.read_text())
        return content

    def workers(self) -> list[tuple[int, int]]:
        placement = json.loads(self.run.run_json.read_text())["placement"]
        return [(w["node_rank"], w["local_rank"]) for w in placement["workers"]]


@pytest.fixture
def training(rig: Rig, slurm: Slurm, tmp_path: Path) -> Training:
    return Training(rig, slurm, tmp_path / "training")


def test_each_node_starts_its_workers(
    slurm: Slurm, training: Training, undisturbed: object
) -> None:
    training.open_gates()
    # Options in the environment must not have the job submit itself again.
    job_id = training.submit(
        env={"PACELINE_PARTITION": "main", "PACELINE_NODES": "2", "PACELINE_WORKERS": "2"}
    )
    slurm.wait_for(job_id, "COMPLETED")
    assert "Finished " in training.log
    assert training.summary()["weights_sha256"] == undisturbed
    assert training.summary()["world_size"] == 4
    assert training.workers() == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_cancelled_and_resumed_by_srun_with_a_task_a_worker(
    rig: Rig, slurm: Slurm, training: Training, tmp_path: Path, undisturbed: object
) -> None:
    job_id = training.submit("--nodes", "2", "--workers", "1")
    training.reach_gate()
    slurm.run("scancel", job_id)
    training.open_gates()
    slurm.wait_for(job_id, "CANCELLED")
    until(lambda: "Stopped. Resume from step" in training.log, _LIMIT_S)
    assert training.summary()["stopped_because"] == "signal"
    assert slurm.field(job_id, "Restarts") == "0"

    # Two nodes with two workers and one, by hand, in a shell that salloc gives.
    resume = paceline("resume", training.run.path)
    srun = ["salloc", "-N2", "-n3", "srun", "-N2", "-n3", "-m", "plane=2", *resume]
    again = Command(rig, slurm, srun, tmp_path / "again")
    assert again.end() == 0, again.err
    assert training.workers() == [(0, 0), (0, 1), (1, 0)]
    assert training.summary()["weights_sha256"] == undisturbed


def test_preempted_and_out_of_time_jobs_go_on_exactly(
    rig: Rig, slurm: Slurm, tmp_path: Path, undisturbed: object
) -> None:
    preempted = Training(rig, slurm, tmp_path / "preempted")
    limited = Training(rig, slurm, tmp_path / "limited")
    nodes = ["--nodes", "2", "--workers", "1"]
    first = preempted.submit(*nodes, patch={"nodelist": "n0,n1", "exclusive": True})
    second = limited.submit(*nodes, patch={"nodelist": "n2,n3", "signal": "TERM@55"})
    preempted.reach_gate()
    limited.reach_gate()
    slurm.run("scontrol", "update", f"jobid={second}", "timelimit=1")
    urgent = ["srun", "-p", "urgent", "-N2", "-w", "n0,n1", "--exclusive", "hostname"]
    higher = Command(rig, slurm, urgent, tmp_path / "urgent")
    until(lambda: slurm.field(first, "PreemptTime") != "None", _LIMIT_S)
    preempted.open_gates()
    assert higher.end() == 0
    until(lambda: "STEP" in limited.log, _LIMIT_S)  # slurmd's note of the signal
    limited.open_gates()
    for job_id in (first, second):
        slurm.wait_for(job_id, "PENDING")

    slurm.run("scontrol", "update", f"jobid={second}", "timelimit=30")
    for training, job_id in ((preempted, first), (limited, second)):
        assert training.summary()["stopped_because"] == "signal"
        slurm.start_again(job_id)
    for training, job_id in ((preempted, first), (limited, second)):
        slurm.wait_for(job_id, "COMPLETED")
        assert slurm.field(job_id, "Restarts") == "1"
        assert training.summary()["weights_sha256"] == undisturbed


def test_a_lost_worker_is_worth_a_retry_and_an_error_of_the_job_is_not(
    rig: Rig, slurm: Slurm, training: Training
) -> None:
    job_id = training.submit("--nodes", "2", "--workers", "1", patch={"nodelist": "n2,n3"})
    training.reach_gate()
    worker_on(rig.host(3)).kill()
    training.open_gates()
    slurm.wait_for(job_id, "PENDING")
    assert "rank 1 (h3" in training.log
    assert "killed by SIGKILL" in training.log
    (training.room / "boom").touch()
    slurm.start_again(job_id)
    slurm.wait_for(job_id, "FAILED")
    assert "ValueError: boom" in training.log
    assert slurm.field(job_id, "Restarts") == "1"
    assert slurm.field(job_id, "ExitCode") == "65:0"


def test_what_slurm_refuses_is_said(
    rig: Rig, slurm: Slurm, training: Training, tmp_path: Path
) -> None:
    words = ["train", "digits", "--on", "slurm", "--submit", "--partition", "nowhere"]
    command = Command(rig, slurm, paceline(*words), tmp_path / "nowhere")
    assert command.end() == 2
    assert "invalid partition specified: nowhere" in command.err
    assert "not submitted: sbatch ended with exit code 1" in command.err


def test_quotes_reach_slurm(slurm: Slurm, training: Training) -> None:
    comment = """it's "$(touch x)" `y` \\ # & ; é"""
    job_id = training.submit(patch={"comment": comment, "hold": True})
    shown = slurm.run("scontrol", "show", "job", "-o", job_id)
    slurm.run("scancel", job_id)
    assert f" Comment={comment} " in shown.partition("Requeue=")[2], shown[-700:]
