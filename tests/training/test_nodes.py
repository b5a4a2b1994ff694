"""Trainings on nodes with a disk each: a node that comes without snapshots loses nothing."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.checkpoint.store import SnapshotStore
from paceline.distributed.group import Group
from paceline.training import status_exchange
from paceline.training.config import TrainConfig
from paceline.training.loop import train
from paceline.training.recipe_session import evaluate_best, prepare
from paceline.training.run_record.numerics import NumericsRecord
from paceline.training.setup import open_session
from paceline.training.status_exchange import StopFlag
from tests.support.nodes import on_nodes
from tests.support.ranks import run_ranks
from tests.support.tiers import slow
from tests.support.trainings import (
    Outcome,
    StopAt,
    configure,
    noisy_job,
    pictures,
    plain_job,
    prepared,
    run_training_on,
)

pytestmark = pytest.mark.ranks


def train_on(
    group: Group,
    workers: Sequence[int],
    disks: Sequence[Path],
    config: TrainConfig,
    stop: StopAt | None = None,
) -> Outcome:
    """Train with `workers[n]` workers on a node whose disk is `disks[n]`."""
    nodes = on_nodes(group, workers)
    if nodes.placement.node_rank == 1:  # another kind of processor than rank 0's
        original = NumericsRecord.describe
        NumericsRecord.describe = lambda self: {**original(self), "cpu": "other"}  # type: ignore[method-assign]  # this is a forked process
    return run_training_on(nodes, disks[nodes.placement.node_rank], noisy_job, config, stop)


def manifests(disk: Path) -> list[str]:
    store = SnapshotStore(disk / "snapshots", keep_last=2)
    return [store.manifest(step) for step in store.steps()]


@pytest.mark.parametrize("workers", [[1, 1], slow([2, 1])])
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.core_cases(1)
def test_a_node_that_lost_its_disk(workers: list[int], lost: int, tmp_path: Path) -> None:
    world_size = sum(workers)
    config = configure(optimizer="sgd", momentum=0.9, clip_norm=0.5)
    whole_disks = [tmp_path / "whole-a", tmp_path / "whole-b"]
    whole = run_ranks(world_size, train_on, workers, whole_disks, config, None)
    disks = [tmp_path / "a", tmp_path / "b"]
    for at in (4, 5):  # in mid-epoch
        stop = StopAt(rank=1, forward=at)
        run_ranks(world_size, train_on, workers, disks, config, stop)
        held = manifests(disks[0])
        assert held
        # The same bytes on both, also where a worker had no share of an epoch's last batch: of 2
        # samples, three workers get one, one and none, and BatchNorm counts batches.
        assert manifests(disks[1]) == held
        shutil.rmtree(disks[lost] / "snapshots")
    resumed = run_ranks(world_size, train_on, workers, disks, config, None)
    assert resumed[0].summary["weights_sha256"] == whole[0].summary["weights_sha256"]
    assert all(map(torch.equal, resumed[-1].parameters, whole[-1].parameters))
    assert [o.optimizer for o in resumed] == [o.optimizer for o in whole]
    assert resumed[0].rows == whole[0].rows
    assert resumed[0].samples_seen == whole[0].samples_seen


@pytest.mark.slow
def test_nodes_come_and_go(tmp_path: Path) -> None:
    """One worker, then three on three nodes of two kinds, then two with a new one in front."""
    config = configure(shards=4, allow_different_hardware=True)
    whole = run_ranks(1, run_training_on, tmp_path / "whole", noisy_job, config, None)
    a, b, c, new = (tmp_path / name for name in ("a", "b", "c", "new"))
    run_ranks(1, train_on, [1], [a], config, StopAt(rank=0, forward=10))
    run_ranks(3, train_on, [1, 1, 1], [a, b, c], config, StopAt(rank=1, forward=6))
    assert manifests(a)[-1] == manifests(b)[-1] == manifests(c)[-1]
    (new / "snapshots").mkdir(parents=True)
    resumed = run_ranks(2, train_on, [1, 1], [new, c], config, None)
    assert resumed[0].summary["weights_sha256"] == whole[0].summary["weights_sha256"]
    assert resumed[0].summary["state_sha256"] == whole[0].summary["state_sha256"]
    assert resumed[0].rows == whole[0].rows


def judge_on(group: Group, disks: Sequence[Path], lost: int | None) -> dict[str, object]:
    """Train to the end, lose a node's best snapshot, and judge it on a test set."""
    status_exchange._EVERY_S = 0.0  # this is a forked process
    nodes = on_nodes(group, [1] * len(disks)) if len(disks) > 1 else group
    run = prepared(disks[nodes.placement.node_rank])
    config = configure(lr=0.5)
    job = replace(plain_job(), test=pictures(11, seed=3))
    with open_session(config, run, nodes, StopFlag(under_launcher=True)) as session:
        training = prepare(session, job)
        train(training)
        session.engine.snapshots.flush()
        nodes.barrier()
        if lost == nodes.rank:
            best = json.loads((run.snapshots / "best.json").read_text())["snapshot"]
            shutil.rmtree(run.snapshots / best)
        nodes.barrier()
        return evaluate_best(training)


@pytest.mark.slow
def test_the_best_is_judged_where_a_node_lacks_it(tmp_path: Path) -> None:
    expected = run_ranks(2, judge_on, [tmp_path / "shared"], None)
    assert expected[0].keys() >= {"test_samples", "test_loss", "test_accuracy"}
    for lost in (0, 1):
        disks = [tmp_path / f"{lost}-{node}" for node in range(2)]
        assert run_ranks(2, judge_on, disks, lost) == expected
