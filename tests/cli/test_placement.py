"""Workers started one by one, by hand or by a launcher's variables, in processes of their own."""

import json
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from paceline.errors import ExitCode
from tests.cli.conftest import Finished, Paceline, summary, wait_for_step, wait_until
from tests.launch.waiting import patient
from tests.support import standin
from tests.support.ports import free_port
from tests.support.tiers import slow

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).resolve().parents[2]
COMMON = ("--threads", "1", "--global-batch", "64")
SHORT = ("--epochs", "2", *COMMON)


def by_hand(rank: int, init_method: str, world_size: int = 2, epochs: int = 2) -> list[str]:
    return [
        *("train", "digits", "--epochs", str(epochs), *COMMON, "--init-method", init_method),
        *("--rank", str(rank), "--world-size", str(world_size), "--local-rank", str(rank)),
    ]


def finish_all(
    paceline: Paceline, processes: list[subprocess.Popen[str]]
) -> tuple[Finished, Finished]:
    first, second = [paceline.finish(process) for process in processes]
    return first, second


def only_run(paceline: Paceline) -> Path:
    (run,) = (paceline.directory / "runs").iterdir()
    return run


@pytest.fixture(scope="module")
def usual_weights(tmp_path_factory: pytest.TempPathFactory) -> object:
    """What two workers on this machine train in the usual way."""
    command = Paceline(tmp_path_factory.mktemp("usual"))
    done = command.run("train", "digits", *SHORT, "--workers", "2", "--run-dir", "run")
    assert done.code == 0, done.err
    return summary(command.directory / "run")["weights_sha256"]


@pytest.mark.parametrize("scheme", ["tcp", slow("file"), slow("env")])
@pytest.mark.slow
def test_two_terminals(scheme: str, paceline: Paceline, usual_weights: object) -> None:
    port = str(free_port())
    meeting = paceline.directory / "meeting"
    init_method = {"tcp": f"tcp://127.0.0.1:{port}", "file": f"file://{meeting}", "env": "env://"}
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": port} if scheme == "env" else {}
    started = [paceline.start(*by_hand(rank, init_method[scheme]), env=address) for rank in (1, 0)]
    second, first = finish_all(paceline, started)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    run = only_run(paceline)  # both agreed on it, and only the first worker tells about it
    assert str(run) in first.out
    assert second.out == ""
    assert summary(run)["weights_sha256"] == usual_weights
    assert {path.name for path in (run / "logs").iterdir()} == {"rank-0.log", "rank-1.log"}
    assert not meeting.exists()
    found = json.loads((run / "run.json").read_text())["placement"]
    assert (found["source"], found["backend"], found["nodes"]) == ("options", "gloo", 1)
    assert [worker["rank"] for worker in found["workers"]] == [0, 1]
    assert [worker["local_rank"] for worker in found["workers"]] == [0, 1]
    if scheme != "file":
        assert found["init_method"].endswith(port)
        assert {worker["address"] for worker in found["workers"]} == {"127.0.0.1"}


@pytest.mark.slow
def test_where_a_worker_stood_is_not_resumed(paceline: Paceline) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    for done in finish_all(paceline, [paceline.start(*by_hand(r, address)) for r in (0, 1)]):
        assert done.code == 0, done.err
    run = only_run(paceline)
    more = ("--epochs", "3", "--allow-change", "epochs")
    done = paceline.run("resume", run, *more)  # on this machine, by the usual launcher
    assert done.code == 0, done.err
    settings = json.loads((run / "run.json").read_text())["settings"]
    assert (settings["rank"], settings["init_method"]) == (None, None)


SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "localhost",
}


@pytest.mark.parametrize(
    ("source", "common", "of_rank"),
    [
        ("slurm", SLURM, {"SLURM_PROCID": "{}", "SLURM_NODEID": "{}", "SLURM_LOCALID": "0"}),
        ("torch", {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1"}, {"PET_NODE_RANK": "{}"}),
    ],
)
@pytest.mark.slow
def test_launchers_variables(
    source: str,
    common: Mapping[str, str],
    of_rank: Mapping[str, str],
    cold_paceline: Paceline,  # a node's launcher keeps a store, and can't be forked then
    usual_weights: object,
) -> None:
    port = str(free_port())
    addresses = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    addresses |= {f"PET_{name}": value for name, value in addresses.items()}
    started = [
        cold_paceline.start(
            *("train", "digits", *SHORT),
            env={**addresses, **common, **{n: v.format(rank) for n, v in of_rank.items()}},
        )
        for rank in (0, 1)
    ]
    first, second = finish_all(cold_paceline, started)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    run = only_run(cold_paceline)
    assert summary(run)["weights_sha256"] == usual_weights
    assert json.loads((run / "run.json").read_text())["placement"]["source"] == source


@pytest.mark.slow
def test_a_file_of_an_earlier_training(paceline: Paceline) -> None:
    meeting = paceline.directory / "meeting"
    killed = paceline.start(*by_hand(0, f"file://{meeting}"))
    deadline_s = time.monotonic() + patient(60)
    while not (meeting.exists() and b"arrived/0" in meeting.read_bytes()):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    killed.kill()
    killed.communicate()
    done = paceline.run(*by_hand(0, f"file://{meeting}"))
    assert done.code == ExitCode.USAGE
    assert "meeting holds the meeting of an earlier training, or two workers" in done.err
    assert "Remove the file" in done.err
    assert "Traceback" not in done.err


def test_missing_workers_are_named(paceline: Paceline) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    done = paceline.run(*by_hand(0, address, world_size=3), "--timeout-s", "1")
    assert done.code == ExitCode.INFRASTRUCTURE
    assert f"ranks [1, 2] did not come to {address} within 1 s" in done.err


def test_a_port_in_use(paceline: Paceline) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        done = paceline.run(*by_hand(0, address))
    assert done.code == ExitCode.INFRASTRUCTURE
    assert f"rank 0 can't listen at {address}: Address already in use" in done.err


def test_an_address_of_another_host(paceline: Paceline) -> None:
    done = paceline.run(*by_hand(0, "tcp://203.0.113.7:29500"))
    assert done.code == ExitCode.USAGE
    assert "203.0.113.7 is none of this host's addresses (" in done.err


@pytest.mark.slow
def test_an_old_run_directory_is_refused_by_all(paceline: Paceline) -> None:
    run = paceline.directory / "old"
    run.mkdir()
    (run / "run.json").write_text("{}")
    address = f"tcp://127.0.0.1:{free_port()}"
    started = [paceline.start(*by_hand(rank, address), "--run-dir", run) for rank in (0, 1)]
    for done in finish_all(paceline, started):
        assert done.code == ExitCode.USAGE
        assert "already holds a training" in done.err


@pytest.mark.slow
def test_nothing_listens_on_all_interfaces(paceline: Paceline) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    started = [
        paceline.start(*by_hand(rank, address, epochs=100_000), "--lr", "1e-9") for rank in (0, 1)
    ]
    wait_until((paceline.directory / "runs").exists, "a run")
    wait_until(lambda: any((paceline.directory / "runs").iterdir()), "its directory")
    wait_for_step(only_run(paceline), 1)  # both listen, and heed signals, by then
    listening = {where for process in started for where in listening_at(process.pid)}
    for process in started:
        process.terminate()
    codes = [done.code for done in finish_all(paceline, started)]
    assert listening == {"127.0.0.1"}
    assert codes == [ExitCode.RESUMABLE] * 2


def listening_at(pid: int) -> set[str]:
    sockets = psutil.Process(pid).net_connections("inet")
    return {entry.laddr.ip for entry in sockets if entry.status == psutil.CONN_LISTEN}


@pytest.mark.slow
def test_sagemakers_backend_by_a_stand_in(paceline: Paceline, usual_weights: object) -> None:
    """A whole training within five collectives, with the weights of Gloo."""
    package = standin.install(paceline.directory)
    done = paceline.run(
        *("train", "digits", *SHORT, "--workers", "2", "--backend", "smddp", "--device", "cpu"),
        *("--run-dir", "run"),
        env={"PYTHONPATH": f"{package}:{ROOT}"},
    )
    assert done.code == 0, done.err
    run = paceline.directory / "run"
    assert summary(run)["weights_sha256"] == usual_weights
    assert json.loads((run / "run.json").read_text())["placement"]["backend"] == "smddp"


def test_sagemakers_backend_where_it_isnt(paceline: Paceline) -> None:
    done = paceline.run(
        "train", "digits", "--workers", "2", "--backend", "smddp", "--device", "cpu"
    )
    assert done.code == ExitCode.USAGE
    assert "--backend smddp needs SageMaker's library" in done.err
    assert "Traceback" not in done.err
