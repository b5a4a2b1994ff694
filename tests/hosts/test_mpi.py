"""Workers that mpirun starts, of Open MPI and of MPICH: ranks, stopping, failures, exit codes."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.hosts.overhosts import COMMON, RECIPE
from tests.launch.waiting import alive, patient, until
from tests.support.needs import AS_ROOT, MPICH, OPEN_MPI, Need, need
from tests.support.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.ranks, pytest.mark.xdist_group("hosts")]

WORKERS = 2
_LIMIT_S = 120.0
_ENVIRONMENT = {**AS_ROOT, "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Mpi:
    """One of the two: how it is called, what it makes of signals and of exit codes."""

    need: Need
    command: tuple[str, ...]
    source: str
    """As Paceline names it in run.json."""
    stop: signal.Signals
    """What makes its workers stop in order."""
    codes_of_failed: frozenset[int]
    code_of_killed: int


_OPEN_MPI = Mpi(
    OPEN_MPI,
    ("mpirun.openmpi", "--oversubscribe"),
    "openmpi",
    signal.SIGUSR2,
    frozenset({65}),
    137,
)
# MPICH joins the codes of all workers bit by bit: with the 70 of a worker that lost its peer.
_MPICH = Mpi(MPICH, ("mpirun.mpich",), "mpich", signal.SIGINT, frozenset({65, 65 | 70}), 9)


@dataclass
class Training:
    """The recipe with gates (see recipe.py) under mpirun."""

    mpi: Mpi
    directory: Path
    started: "list[subprocess.Popen[bytes]]" = field(default_factory=list)

    @property
    def run(self) -> Path:
        return self.directory / "run"

    @property
    def output(self) -> str:
        return (self.directory / "output").read_text(errors="replace")

    def start(self, *words: str | Path) -> "subprocess.Popen[bytes]":
        (self.directory / "room").mkdir(exist_ok=True)
        own = ["--run-dir", self.run, "--room", self.directory / "room"]
        usual = ["train", RECIPE, *COMMON, *own]
        paceline = [sys.executable, "-m", "paceline", *(words or usual)]
        with (self.directory / "output").open("w") as output:
            process = subprocess.Popen(
                [*self.mpi.command, "-np", str(WORKERS), *map(str, paceline)],
                env={**os.environ, **_ENVIRONMENT, **self._port()},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def _port(self) -> dict[str, str]:
        # MPICH's jobs have no names to derive ports from: all would meet at the usual one.
        return {"MASTER_PORT": str(free_port())} if self.mpi is _MPICH else {}

    def reach_gate(self) -> None:
        gate, process = self.directory / "room" / "reached-0-1", self.started[-1]
        with suppress(TimeoutError):
            until(lambda: gate.exists() or process.poll() is not None, _LIMIT_S)
        assert gate.exists(), f"exit code {process.poll()}\n{self.output}"

    def open_gates(self) -> None:
        (self.directory / "room" / "open").touch()

    def summary(self) -> Mapping[str, object]:
        content: Mapping[str, object] = json.loads((self.run / "summary.json").read_text())
        return content


def workers_of(process: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    found = psutil.Process(process.pid).children(recursive=True)
    return [p for p in found if p.cmdline()[1:3] == ["-m", "paceline"]]


@pytest.fixture(params=[_OPEN_MPI, _MPICH], ids=lambda mpi: mpi.source)
def training(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Training]:
    mpi: Mpi = request.param
    need(mpi.need)
    training = Training(mpi, tmp_path)
    yield training
    for process in training.started:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
            process.wait(patient(_LIMIT_S))


def test_stopped_in_order_and_gone_on_with(training: Training) -> None:
    process = training.start()
    training.reach_gate()
    process.send_signal(training.mpi.stop)
    training.open_gates()
    assert process.wait(patient(_LIMIT_S)) == 75, training.output
    assert training.summary()["stopped_because"] == "signal"
    again = training.start("resume", training.run)
    assert again.wait(patient(_LIMIT_S)) == 0, training.output
    assert training.summary()["stopped_because"] == "epochs"
    assert training.summary()["world_size"] == WORKERS
    placement = json.loads((training.run / "run.json").read_text())["placement"]
    assert placement["source"] == training.mpi.source
    assert [(w["rank"], w["local_rank"]) for w in placement["workers"]] == [(0, 0), (1, 1)]


def test_a_failing_job_and_a_killed_worker_end_all(training: Training) -> None:
    process = training.start()
    training.reach_gate()
    (training.directory / "room" / "boom").touch()
    training.open_gates()
    assert process.wait(patient(_LIMIT_S)) in training.mpi.codes_of_failed, training.output
    assert "ValueError: boom" in training.output

    shutil.rmtree(training.directory / "room")
    shutil.rmtree(training.run)
    process = training.start()
    training.reach_gate()
    workers = workers_of(process)
    assert len(workers) == WORKERS
    workers[-1].kill()
    training.open_gates()
    assert process.wait(patient(_LIMIT_S)) == training.mpi.code_of_killed, training.output
    until(lambda: not any(alive(worker.pid) for worker in workers), _LIMIT_S)
