from collections.abc import Mapping

import pytest

from paceline.cli.here import worker_here, workers_of_node
from paceline.dist.options import DistOptions
from paceline.dist.placement import Placement
from paceline.errors import UsageError
from paceline.launch.options import LaunchOptions
from tests.dist.test_launchers import SRUN, SRUN_FOUND, TORCH

NODES = {"PET_NODE_RANK": "1", "PET_NNODES": "2", "PET_MASTER_ADDR": "job-0"}
ONE_TASK = SRUN | {
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_NODEID": "0",
}


def find(
    environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch, **options: object
) -> Placement | None:
    monkeypatch.setattr("paceline.cli.here.surroundings", lambda: dict(environment))
    ours = {n: v for n, v in options.items() if n in ("on", "workers")}
    dist = {n: v for n, v in options.items() if n not in ours}
    launch = LaunchOptions(**ours)  # type: ignore[arg-type]
    return worker_here(launch, DistOptions(device="cpu", **dist))  # type: ignore[arg-type]


def test_who_starts_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find({}, monkeypatch) is None
    assert find({}, monkeypatch, on="here") == Placement()
    assert find(SRUN, monkeypatch) == SRUN_FOUND
    assert find(SRUN, monkeypatch, workers=6) == SRUN_FOUND
    assert find(SRUN, monkeypatch, on="local") is None


def test_a_shell_in_one_task_may_start_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = find(ONE_TASK, monkeypatch)
    assert found is not None
    assert found.world_size == 1
    assert find(ONE_TASK, monkeypatch, workers=4) is None


def test_one_worker_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    for options in ({}, {"workers": 1}):
        found = find(NODES, monkeypatch, **options)
        assert found is not None
        assert (found.rank, found.world_size, found.source) == (1, 2, "kubeflow")


def test_the_only_node_says_how_many_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = NODES | {"PET_NODE_RANK": "0", "PET_NNODES": "1", "PET_NPROC_PER_NODE": "3"}
    assert find(alone, monkeypatch) is None
    assert workers_of_node() == 3
    assert find(alone | TORCH, monkeypatch) is not None
    assert workers_of_node() is None


@pytest.mark.parametrize(
    ("environment", "options", "message"),
    [
        (SRUN, {"workers": 4}, "--workers 4, but 6 worker"),
        (TORCH | {"WORLD_SIZE": "1"}, {"workers": 4}, "--workers 4, but 1 worker"),
        ({}, {"init_method": "tcp://a:1"}, "needs --rank and --world-size, or a launcher"),
        (
            NODES | {"PET_NPROC_PER_NODE": "8"},
            {},
            "torchrun --nnodes 2 --node-rank 1 --nproc-per-node 8 --master-addr job-0 "
            "--master-port 29500 -m paceline train",
        ),
    ],
)
def test_contradictions(
    environment: Mapping[str, str],
    options: dict[str, object],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UsageError, match=message):
        find(environment, monkeypatch, **options)
