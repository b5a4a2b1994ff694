from collections.abc import Mapping

import pytest

from paceline.distributed.options import DistOptions
from paceline.distributed.placement import Placement
from paceline.errors import UsageError
from paceline.launch.options import LaunchOptions
from paceline.launch.ssh.options import HostsOptions
from paceline.runtime import placement
from paceline.runtime.placement import choose_place, node_here, worker_here, workers_of_node
from paceline.training.config import TrainConfig
from tests.distributed.test_launcher_variables import SRUN, SRUN_FOUND, TORCH

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
    monkeypatch.setattr("paceline.runtime.placement.read_environment", lambda: dict(environment))
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


def test_a_node_of_several_starts_its_own_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    for workers in (None, 1, 3):
        assert find(NODES, monkeypatch, workers=workers) is None
        found = node_here(LaunchOptions(workers=workers), DistOptions(device="cpu"))
        assert found is not None
        assert (found.node_rank, found.nodes, found.workers) == (1, 2, workers or 1)
    alone = find(NODES, monkeypatch, on="here")
    assert alone is not None
    assert (alone.rank, alone.world_size, alone.source) == (1, 2, "kubeflow")
    for launch in (LaunchOptions(on="here"), LaunchOptions(on="local")):
        assert node_here(launch, DistOptions(device="cpu")) is None


def test_the_only_node_says_how_many_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = NODES | {"PET_NODE_RANK": "0", "PET_NNODES": "1", "PET_NPROC_PER_NODE": "3"}
    assert find(alone, monkeypatch) is None
    assert workers_of_node() == 3
    assert node_here(LaunchOptions(), DistOptions(device="cpu")) is None  # it waits for no other
    assert find(alone | TORCH, monkeypatch) is not None
    assert workers_of_node() is None


@pytest.mark.parametrize(
    ("environment", "options", "message"),
    [
        (SRUN, {"workers": 4}, "--workers 4, but 6 worker"),
        (TORCH | {"WORLD_SIZE": "1"}, {"workers": 4}, "--workers 4, but 1 worker"),
        ({}, {"init_method": "tcp://a:1"}, "needs --rank and --world-size, or a launcher"),
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


@pytest.mark.parametrize(
    ("asked", "before", "backend", "workers"),
    [(None, None, "gloo", 2), (5, None, "gloo", 5), (None, 4, "gloo", 4), (None, 4, "nccl", 2)],
)
def test_over_gloo_there_may_be_more_workers_than_gpus(
    asked: int | None,
    before: int | None,
    backend: str,
    workers: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placement, "count_gpus", lambda *_: 2)
    monkeypatch.setattr(placement, "may_have_gpus", lambda: True)
    config = TrainConfig.from_settings({"device": "cuda", "backend": backend, "workers": asked})
    assert placement.local_place(config, usual=before).workers == workers


def test_on_mps_the_command_trains_itself() -> None:
    """What is forked from a process with Apple's frameworks can't use Metal."""
    asked = TrainConfig.from_settings({"device": "mps"})
    assert placement.local_place(asked).here
    assert placement.local_place(asked, usual=4).workers == 1
    with pytest.raises(UsageError, match=r"2 workers with --device mps"):
        placement.local_place(TrainConfig.from_settings({"device": "mps", "workers": 2}))
    with pytest.raises(UsageError, match="--device mps and --hosts"):
        choose_place(asked, hosts=HostsOptions(hosts="a,b"))
