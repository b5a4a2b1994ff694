"""Which snapshot several nodes go on from, with a disk in common or one each."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.checkpoint.format import Snapshot
from paceline.checkpoint.store import SnapshotStore
from paceline.dist.group import Group
from paceline.errors import SnapshotError
from paceline.trainer.finding import newest_common
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks


def publish(directory: Path, steps: list[int]) -> SnapshotStore:
    store = SnapshotStore(directory, keep_last=9)
    for step in steps:
        tensors = {"model": {"weight": torch.full((2,), float(step))}}
        store.publish(Snapshot(step=step, tensors=tensors, state={}), best=False)
    return store


def on_nodes(group: Group, workers: int) -> Group:
    """The same workers, as if `workers` of them were on each node."""
    rank = group.rank
    placement = replace(
        group.placement,
        local_rank=rank % workers,
        local_world_size=workers,
        node_rank=rank // workers,
        nodes=group.world_size // workers,
    )
    return Group(placement, group.device, group.backend)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([3, 6, 9], [3, 6, 9], 9),
        ([3, 6, 9], [3, 6], 6),  # the second node died before it had written
        ([3, 9], [3, 6], 3),
        ([], [], None),
    ],
)
def test_nodes_with_disks_of_their_own_agree(
    first: list[int], second: list[int], expected: int | None, tmp_path: Path
) -> None:
    stores = [publish(tmp_path / "a", first), publish(tmp_path / "b", second)]

    def body(group: Group) -> int | None:
        nodes = on_nodes(group, 2)
        store = stores[nodes.placement.node_rank]
        found = newest_common(store, nodes, print, shared=False)
        if found is None:
            return None
        assert float(found.tensors["model"]["weight"][0]) == found.step
        return found.step

    assert run_ranks(4, body) == [expected] * 4


def test_a_damaged_snapshot_of_one_node_is_left_out_on_all(tmp_path: Path) -> None:
    stores = [publish(tmp_path / "a", [3, 6]), publish(tmp_path / "b", [3, 6])]
    damaged = stores[1].path_of(6) / "tensors.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")

    def body(group: Group) -> int:
        nodes = on_nodes(group, 1)
        told: list[str] = []
        found = newest_common(stores[nodes.placement.node_rank], nodes, told.append, shared=False)
        assert len(told) == group.rank  # the second node says so
        assert found is not None
        return found.step

    assert run_ranks(2, body) == [3, 3]


def test_a_node_without_any_is_named(tmp_path: Path) -> None:
    stores = [publish(tmp_path / "a", [3]), publish(tmp_path / "b", [])]

    def body(group: Group) -> str:
        nodes = on_nodes(group, 1)
        with pytest.raises(SnapshotError) as caught:
            newest_common(stores[nodes.placement.node_rank], nodes, print, shared=False)
        return str(caught.value)

    assert all("nodes of rank 1 have no snapshot" in said for said in run_ranks(2, body))


def test_on_a_shared_disk_rank_0_looks_for_all(tmp_path: Path) -> None:
    store = publish(tmp_path / "a", [3, 6])

    def body(group: Group) -> int:
        found = newest_common(store, on_nodes(group, 1), print, shared=True)
        assert found is not None
        return found.step

    assert run_ranks(2, body) == [6, 6]
