"""Which snapshot several nodes go on from, with a disk in common or one each."""

import errno
import os
import shutil
import socket
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
import torch

from paceline.checkpoint import file_writer, streaming
from paceline.checkpoint.format import Snapshot
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.store import SnapshotStore
from paceline.distributed.group import Group
from paceline.errors import InfrastructureError, SnapshotError
from paceline.training.snapshots import transfer
from paceline.training.snapshots.discovery import best_weights, find_origin
from tests.support import snapshots
from tests.support.nodes import on_nodes
from tests.support.ranks import run_ranks

Pieces = Generator[int, None, None]

pytestmark = pytest.mark.ranks


def publish(
    directory: Path,
    steps: list[int],
    *,
    generation: int = 1,
    best: int = -1,
    salt: float = 0,
    start: str = "",
) -> SnapshotStore:
    store = SnapshotStore(directory, keep_last=9)
    for step in steps:
        tensors = {"model": {"weight": torch.full((2,), step + salt)}}
        state = {"generation": generation, "start": start}
        snapshot = Snapshot(step=step, tensors=tensors, state=state)
        snapshots.publish(store, snapshot, best=step == best)
    return store


def content(store: SnapshotStore) -> dict[str, bytes]:
    """All that a store holds, by name."""
    paths = [path for path in store.directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(store.directory)): path.read_bytes() for path in paths}


def go_on(group: Group, workers: list[int], stores: list[SnapshotStore]) -> tuple[int, float, int]:
    """Look for a snapshot. Returns its step, a weight, and the generation."""
    nodes = on_nodes(group, workers)
    found = find_origin(stores[nodes.placement.node_rank], nodes, print, shared=False)
    if found.snapshot is None:
        return -1, 0.0, found.generation
    weight = float(found.snapshot.tensors["model"]["weight"][0])
    return found.snapshot.step, weight, found.generation


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        ([[3, 6, 9], [3, 6, 9], [3, 6, 9]], 9),
        ([[3, 6, 9], [3, 6], []], 9),  # the second died before it had written, the third is new
        ([[], [3, 6], [3]], 6),  # rank 0's node is the new one
        ([[3], [], [3, 9]], 9),
        ([[], [], []], -1),
    ],
)
@pytest.mark.core_cases(2)
def test_all_nodes_get_the_newest(held: list[list[int]], expected: int, tmp_path: Path) -> None:
    stores = [publish(tmp_path / str(n), steps) for n, steps in enumerate(held)]
    generation = 1 + (expected > 0)
    found = run_ranks(4, go_on, [2, 1, 1], stores)
    assert found == [(expected, max(expected, 0), generation)] * 4
    for store, steps in zip(stores, held, strict=True):
        assert store.steps() == sorted({*steps} | ({expected} & {3, 6, 9}))
        assert store.generation() == generation
        assert store.newest_good(pytest.fail) is None or expected > 0
    if expected > 0:
        assert len({store.manifest(expected) for store in stores}) == 1
    assert not [n for store in stores for n in content(store) if n.startswith(".")]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.core_cases(2)
def test_one_worker_a_node(world_size: int, tmp_path: Path) -> None:
    stores = [publish(tmp_path / str(n), []) for n in range(world_size - 1)]
    stores.append(publish(tmp_path / "last", [3, 6], best=3))
    found = run_ranks(world_size, go_on, [1] * world_size, stores)
    assert found == [(6, 6.0, 2)] * world_size
    for store in stores:
        assert store.steps() == [3, 6]
        assert store.best() == store.path_of(3)
        assert content(store) == content(stores[-1])


def test_a_snapshot_of_several_pieces_travels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (streaming, transfer):
        monkeypatch.setattr(module, "PIECE_BYTES", 100)  # not a divisor of the files' sizes
    stores = [publish(tmp_path / "a", []), publish(tmp_path / "b", [3])]
    assert run_ranks(3, go_on, [1, 2], stores) == [(3, 3.0, 2)] * 3
    assert content(stores[0]) == content(stores[1])


def test_a_damaged_copy_is_replaced_by_another_nodes(tmp_path: Path) -> None:
    stores = [publish(tmp_path / "a", [3, 6]), publish(tmp_path / "b", [3, 6])]
    shutil.rmtree(stores[0].path_of(3))
    damaged = stores[0].path_of(6) / "tensors.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")

    def body(group: Group) -> list[str]:
        told: list[str] = []
        nodes = on_nodes(group, [1, 1])
        store = stores[nodes.placement.node_rank]
        found = find_origin(store, nodes, told.append, shared=False)
        assert found.snapshot is not None
        assert found.snapshot.step == 6
        return told

    told = run_ranks(2, body)
    assert [len(lines) for lines in told] == [1, 0]
    assert "is damaged" in told[0][0]
    assert told[0][0].endswith("and there is none before it on this host")
    assert stores[0].manifest(6) == stores[1].manifest(6)
    assert [p.name for p in stores[0].directory.glob("*.damaged")] == ["step-000000000006.damaged"]


@pytest.mark.parametrize("others", [[3], [3, 6]])
def test_an_owner_that_cant_read_on_is_left_out(others: list[int], tmp_path: Path) -> None:
    """Its disk fails after the snapshot was verified and before it was sent."""
    stores = [publish(tmp_path / "a", [3, 6]), publish(tmp_path / "b", others)]
    stores.append(publish(tmp_path / "c", []))
    expected = max(others)

    def body(group: Group) -> tuple[int, float, int]:
        if group.rank == 0:
            _fail_to_read(6)
        return go_on(group, [1, 1, 1], stores)

    assert run_ranks(3, body) == [(expected, expected, 2)] * 3
    assert len({store.manifest(expected) for store in stores}) == 1
    assert all(store.steps()[-1] == expected for store in stores)
    assert stores[0].newest_good(pytest.fail) is not None


def _fail_to_read(step: int) -> None:
    original = streaming.read_pieces

    def failing(directory: Path, manifest: Manifest, into: memoryview) -> Pieces:
        reading = original(directory, manifest, into)
        yield next(reading)
        if manifest.step == step:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        yield from reading

    setattr(transfer, "read_pieces", failing)  # noqa: B010  # this is a forked process


@pytest.mark.parametrize("starts", [("", ""), ("one", "other"), ("", "other")])
def test_different_snapshots_of_one_step_are_refused(
    starts: tuple[str, str], tmp_path: Path
) -> None:
    stores = [
        publish(tmp_path / "a", [3], start=starts[0]),
        publish(tmp_path / "b", [3], salt=0.5, start=starts[1]),
    ]

    def body(group: Group) -> str:
        with pytest.raises(SnapshotError) as caught:
            go_on(group, [1, 1], stores)
        return str(caught.value)

    told = run_ranks(2, body)
    host = socket.gethostname()
    assert len(set(told)) == 1
    assert f"{host} (rank 0) and {host} (rank 1) have different snapshots of step 3" in told[0]
    assert [store.steps() for store in stores] == [[3], [3]]


def test_of_snapshots_taken_together_one_holds_for_all(tmp_path: Path) -> None:
    """They may differ in what a script keeps for each worker by itself."""
    stores = [
        publish(tmp_path / "a", [3], start="one"),
        publish(tmp_path / "b", [3], salt=0.5, start="one"),
    ]
    assert run_ranks(3, go_on, [1, 2], stores) == [(3, 3.0, 2)] * 3
    assert content(stores[0]) == content(stores[1])


@pytest.mark.parametrize("salt", [0.0, 0.5])
def test_a_branch_that_was_given_up_is_set_aside(salt: float, tmp_path: Path) -> None:
    """While the second was away, the first went on from step 3 again."""
    stores = [publish(tmp_path / "a", [3]), publish(tmp_path / "b", [3])]
    publish(tmp_path / "a", [6], generation=2, best=6)
    publish(tmp_path / "b", [6, 9, 12], salt=salt, best=12)
    assert run_ranks(2, go_on, [1, 1], stores) == [(6, 6.0, 3)] * 2
    assert [store.steps() for store in stores] == [[3, 6], [3, 6]]
    assert stores[0].manifest(6) == stores[1].manifest(6)
    assert [store.best() for store in stores] == [store.path_of(6) for store in stores]
    aside = sorted(path.name for path in stores[1].directory.glob("*.superseded"))
    assert aside == ["step-000000000009.superseded", "step-000000000012.superseded"]


def test_a_start_that_took_no_snapshot_counts(tmp_path: Path) -> None:
    """Its number is on the disks of all that took part; what the absent come back with is older."""
    stores = [publish(tmp_path / "a", [3]), publish(tmp_path / "b", [3])]
    assert run_ranks(1, go_on, [1], stores[:1]) == [(3, 3.0, 2)]
    assert run_ranks(2, go_on, [1, 1], stores) == [(3, 3.0, 3)] * 2
    assert [store.generation() for store in stores] == [3, 3]


def _no_room(monkeypatch: Callable[..., None]) -> None:
    def check(self: SnapshotStore, needed_bytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.directory))

    monkeypatch(SnapshotStore, "_check_space", check)


def _full_in_between(monkeypatch: Callable[..., None]) -> None:
    def write(path: Path, chunks: Iterator[memoryview]) -> None:
        next(iter(chunks))
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch(streaming, "write_file", write)


def _other_bytes(monkeypatch: Callable[..., None]) -> None:
    original = file_writer.write_file

    def write(path: Path, chunks: Iterator[memoryview]) -> object:
        return original(path, (memoryview(bytes(len(chunk))) for chunk in chunks))

    monkeypatch(streaming, "write_file", write)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (_no_room, "No space left on device"),
        (_full_in_between, "No space left on device"),
        (_other_bytes, "arrived damaged"),
    ],
)
@pytest.mark.core_cases(2)
def test_a_node_that_cant_take_it_is_named_by_all(
    fault: Callable[[Callable[..., None]], None], said: str, tmp_path: Path
) -> None:
    stores = [publish(tmp_path / "a", [3]), publish(tmp_path / "b", [])]
    stores.append(publish(tmp_path / "c", []))

    def body(group: Group) -> str:
        if group.rank == 2:
            fault(setattr)
        with pytest.raises(InfrastructureError) as caught:
            go_on(group, [1, 1, 1], stores)
        return str(caught.value)

    told = run_ranks(3, body)
    assert len(set(told)) == 1
    size = sum(path.stat().st_size for path in stores[0].path_of(3).iterdir())
    assert (
        f"{socket.gethostname()} can't take over the snapshot of step 3 ({size} bytes)" in told[0]
    )
    assert said in told[0]
    assert content(stores[2]) == {}


def test_the_best_travels_too(tmp_path: Path) -> None:
    """The second node missed the later best one, the third is new, and the first lost its mark."""
    stores = [publish(tmp_path / "a", [3, 6, 9]), publish(tmp_path / "b", [3, 6, 9], best=3)]
    stores += [publish(tmp_path / "c", [])]
    stores += [publish(tmp_path / "d", [3, 6, 9], best=6)]
    assert run_ranks(4, go_on, [1, 1, 1, 1], stores) == [(9, 9.0, 2)] * 4
    for store in stores:
        assert store.best() == store.path_of(6)
        assert store.newest_good(pytest.fail, at_most=6) is not None


def test_a_best_one_that_cant_be_read_stays_where_it_is(tmp_path: Path) -> None:
    stores = [publish(tmp_path / "a", [3, 6, 9], best=6), publish(tmp_path / "b", [9])]
    damaged = stores[0].path_of(6) / "tensors.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")

    def body(group: Group) -> list[str]:
        told: list[str] = []
        nodes = on_nodes(group, [1, 1])
        store = stores[nodes.placement.node_rank]
        assert find_origin(store, nodes, told.append, shared=False).snapshot is not None
        assert best_weights(store, nodes, told.append, shared=False) is None
        return told

    told = run_ranks(2, body)
    assert [len(lines) for lines in told] == [2, 0]
    assert all("the best snapshot can't be read" in line for line in told[0])
    assert stores[1].best() is None


@pytest.mark.parametrize("shared", [False, True])
def test_the_latest_best_weights_of_all_nodes_count(shared: bool, tmp_path: Path) -> None:
    stores = [publish(tmp_path / "a", [3, 6], best=3), publish(tmp_path / "b", [3, 6], best=6)]

    def body(group: Group) -> tuple[int, list[str]]:
        nodes = on_nodes(group, [1, 2])
        found = best_weights(stores[nodes.placement.node_rank], nodes, pytest.fail, shared=shared)
        assert found is not None
        return found.rank, [*found.tensors]

    owner = 0 if shared else 1
    expected = [(owner, ["weight"] if rank == owner else []) for rank in range(3)]
    assert run_ranks(3, body) == expected


def test_no_best_weights(tmp_path: Path) -> None:
    store = publish(tmp_path / "a", [3])
    assert run_ranks(2, lambda g: best_weights(store, g, print, shared=False)) == [None, None]


def test_on_a_shared_disk_rank_0_looks_for_all(tmp_path: Path) -> None:
    store = publish(tmp_path / "a", [3, 6], generation=4)

    def body(group: Group) -> tuple[int, int]:
        found = find_origin(store, on_nodes(group, [1, 1]), print, shared=True)
        assert found.snapshot is not None
        return found.snapshot.step, found.generation

    assert run_ranks(2, body) == [(6, 5), (6, 5)]
    assert store.generation() == 0
