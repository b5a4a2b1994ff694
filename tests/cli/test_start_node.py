"""Services that start one process on each of several nodes, with several workers each."""

from collections.abc import Mapping

import pytest

from tests.cli.conftest import Paceline, summary
from tests.support.ports import free_port

pytestmark = pytest.mark.ranks

_TRAIN = ("train", "digits", "--epochs", "2", "--shards", "4")


def _node(rank: int, port: int, workers: int) -> Mapping[str, str]:
    return {
        "PET_NODE_RANK": str(rank),
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": str(workers),
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(port),
    }


@pytest.fixture
def paceline(cold_paceline: Paceline) -> Paceline:
    """Start from scratch: a node's launcher keeps a store, and can't be forked any more then."""
    return cold_paceline


@pytest.mark.slow
def test_nodes_with_unequal_workers_train_as_one_worker_would(paceline: Paceline) -> None:
    alone = paceline.run(*_TRAIN, "--workers", "1", "--run-dir", "alone")
    assert alone.code == 0, alone.err
    port = free_port()
    nodes = [
        paceline.start(*_TRAIN, "--run-dir", "r", env=_node(rank, port, workers))
        for rank, workers in ((0, 2), (1, 1))
    ]
    done = [paceline.finish(node) for node in nodes]
    assert [node.code for node in done] == [0, 0], done[0].err + done[1].err
    run = paceline.directory / "r"
    assert summary(run)["weights_sha256"] == summary(paceline.directory / "alone")["weights_sha256"]
    assert (summary(run)["world_size"], summary(run)["nodes"]) == (3, 2)


@pytest.mark.slow
def test_a_failure_on_one_node_ends_the_other(paceline: Paceline) -> None:
    (paceline.directory / "bad.py").write_text(
        "import os, paceline\n\n\n"
        "def bad() -> paceline.Job:\n"
        "    raise ValueError('only here') if os.environ['RANK'] == '3' else TimeoutError('peer')\n"
    )
    port = free_port()
    nodes = [
        paceline.start("train", "bad.py:bad", "--run-dir", "r", env=_node(rank, port, 2))
        for rank in (0, 1)
    ]
    done = [paceline.finish(node) for node in nodes]
    assert [node.code for node in done] == [65, 65]
    assert "ValueError: only here" in done[0].err  # the cause, from the run directory they share
    assert "ValueError: only here" in done[1].err


def test_slurm_says_which_node_it_is(paceline: Paceline) -> None:
    """As in the script of `--on slurm`: a task a node, started in a step."""
    port, step = free_port(), {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    step |= {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2"}
    step |= {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "localhost"}
    words = ("train", "digits", "--epochs", "1", "--run-dir", "r", "--on", "node", "--resume")
    nodes = [
        paceline.start(
            *(*words, "--workers", str(2 - rank), "--threads", "1"),
            env={
                **step,
                **{"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank), "SLURM_LOCALID": "0"},
                "MASTER_PORT": str(port),
            },
        )
        for rank in range(2)
    ]
    done = [paceline.finish(node) for node in nodes]
    assert [node.code for node in done] == [0, 0], done[0].err + done[1].err
    found = summary(paceline.directory / "r")
    assert (found["world_size"], found["nodes"]) == (3, 2)


def test_on_node_needs_slurm(paceline: Paceline) -> None:
    done = paceline.run("train", "digits", "--on", "node")
    assert done.code == 2
    assert "--on node is for what srun has started" in done.err
