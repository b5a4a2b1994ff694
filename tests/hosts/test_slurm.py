"""Trainings on a real Slurm: submitted, followed, stopped, preempted, failed; srun by hand.

The oracle is one undisturbed process: with --shards the final weights have the same bits.
"""

import json
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from paceline.results.run_directory import RunDirectory
from tests.hosts.overhosts import COMMON, RECIPE
from tests.hosts.rig import Rig
from tests.hosts.slurm import Command, Slurm, kill_worker, paceline
from tests.support.needs import SLURM, need

pytestmark = [pytest.mark.hosts, pytest.mark.xdist_group("hosts")]

HOSTS = 4


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
        self._rig, self._slurm, self._directory = rig, slurm, directory
        directory.mkdir()
        self.room, self.run = directory / "room", RunDirectory.named(directory / "run")
        self.room.mkdir()

    @property
    def words(self) -> list[str | Path]:
        own: list[str | Path] = ["--run-dir", self.run.path, "--room", self.room]
        return ["train", RECIPE, *COMMON, *own]

    def submit(self, *options: str, env: Mapping[str, str] | None = None) -> Command:
        words = paceline(*self.words, "--on", "slurm", *options)
        return Command(self._rig, self._slurm, words, self._directory, env)

    def reach_gate(self, command: Command, attempt: int = 0) -> None:
        command.wait_for((self.room / f"reached-{attempt}-1").exists)

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


def test_a_job_is_followed_to_its_end(training: Training, undisturbed: object) -> None:
    training.open_gates()
    # Options in the environment must not have the job submit itself again.
    said = {"PACELINE_PARTITION": "main", "PACELINE_NODES": "2", "PACELINE_WORKERS": "2"}
    command = training.submit(env=said)
    assert command.end() == 0, command.err
    assert "2 nodes, 2 workers on each" in command.out
    assert "Finished " in command.out
    assert "runs" in command.err
    assert training.summary()["weights_sha256"] == undisturbed
    assert training.summary()["world_size"] == 4
    assert training.workers() == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_stopped_by_a_signal_and_gone_on_with_by_srun(
    rig: Rig, slurm: Slurm, training: Training, tmp_path: Path, undisturbed: object
) -> None:
    command = training.submit("--nodes", "2", "--workers", "1")
    training.reach_gate(command)
    command.process.send_signal(signal.SIGINT)
    command.wait_for(lambda: "Stopping job" in command.err)
    training.open_gates()
    assert command.end() == 75, command.err
    assert "Stopped. Resume from step" in command.out
    assert training.summary()["stopped_because"] == "signal"
    assert slurm.field(command.job_id, "Restarts") == "0"

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
    first = preempted.submit(*nodes, "--slurm-arg=--nodelist=n0,n1", "--slurm-arg=--exclusive")
    second = limited.submit(*nodes, "--slurm-arg=--nodelist=n2,n3", "--slurm-grace", "55s")
    preempted.reach_gate(first)
    limited.reach_gate(second)
    slurm.run("scontrol", "update", f"jobid={second.job_id}", "timelimit=1")
    urgent = ["srun", "-p", "urgent", "-N2", "-w", "n0,n1", "--exclusive", "hostname"]
    higher = Command(rig, slurm, urgent, tmp_path / "urgent")
    first.wait_for(lambda: slurm.field(first.job_id, "PreemptTime") != "None")
    preempted.open_gates()
    first.wait_for(lambda: "waits: BeginTime" in first.err)
    assert "Queued again" in first.out
    assert higher.end() == 0
    second.wait_for(lambda: "STEP" in second.out)  # slurmd's note of the signal
    limited.open_gates()
    second.wait_for(lambda: "Queued again" in second.out)

    slurm.start_again(first.job_id)
    slurm.run("scontrol", "update", f"jobid={second.job_id}", "timelimit=30")
    slurm.start_again(second.job_id)
    for training, command in ((preempted, first), (limited, second)):
        assert command.end() == 0, command.err
        assert "runs, restart 1" in command.err
        assert "attempt 1, rank 0" in training.run.rank_log(0).read_text()
        assert training.summary()["weights_sha256"] == undisturbed


def test_a_lost_worker_is_worth_a_retry_and_an_error_of_the_job_is_not(
    rig: Rig, slurm: Slurm, training: Training
) -> None:
    command = training.submit("--nodes", "2", "--workers", "1", "--slurm-arg=--nodelist=n2,n3")
    training.reach_gate(command)
    kill_worker(rig.host(3))
    training.open_gates()
    command.wait_for(lambda: "Queued again" in command.out)
    assert "Killed" in command.out
    (training.room / "boom").touch()
    slurm.start_again(command.job_id)
    assert command.end() == 65, command.err
    assert "ValueError: boom" in command.out
    assert slurm.field(command.job_id, "Restarts") == "1"
    assert slurm.field(command.job_id, "ExitCode") == "65:0"


def test_what_slurm_refuses_or_lets_wait_is_said(
    rig: Rig, slurm: Slurm, training: Training, tmp_path: Path
) -> None:
    command = training.submit("--partition", "nowhere")
    assert command.end() == 2
    assert command.err.count("\n") == 1 + command.err.count("usually a directory")
    assert "Slurm refuses the job: invalid partition specified: nowhere" in command.err
    assert not training.run.path.exists()

    waiting = training.submit("--nodes", str(HOSTS), "--slurm-arg=--begin=now+1hour")
    waiting.wait_for(lambda: "waits: BeginTime" in waiting.err)
    waiting.process.send_signal(signal.SIGTERM)
    assert waiting.end() == 75
    assert slurm.field(waiting.job_id, "JobState") == "CANCELLED"

    # Each host has a /media of its own.
    apart = Command(
        rig,
        slurm,
        paceline("train", "digits", "--on", "slurm", "--run-dir", "/media/apart"),
        tmp_path / "apart",
    )
    assert apart.end() == 70, apart.err
    assert "name one with --run-dir that all nodes and this machine share" in apart.err


def test_quotes_reach_slurm_by_the_script_alone(
    rig: Rig, slurm: Slurm, training: Training, tmp_path: Path
) -> None:
    comment = """it's "$(touch x)" `y` \\ # & ; é"""
    command = training.submit("--dry-run", f"--slurm-arg=--comment={comment}", "--slurm-arg=-H")
    assert command.end() == 0
    script = tmp_path / "by-hand.sh"
    script.write_text(command.out)
    job_id = slurm.run("sbatch", "--parsable", script).strip()
    shown = slurm.run("scontrol", "show", "job", "-o", job_id)
    slurm.run("scancel", job_id)
    assert f" Comment={comment} " in shown.partition("Requeue=")[2], shown[-700:]
