import pytest

from paceline.checkpoint.manifest import STATE, TENSORS, FileEntry, Manifest, encode_manifest
from paceline.errors import SnapshotError
from paceline.training.snapshots.discovery import NONE, SnapshotInventory, choices_of_best, newest


def manifest(step: int, salt: str = "0") -> str:
    entry = FileEntry(bytes=1, sha256=salt * 64)
    return encode_manifest(Manifest(step=step, files={TENSORS: entry, STATE: entry})).decode()


def holding(
    rank: int,
    step: int = NONE,
    generation: int = 0,
    *,
    salt: str = "0",
    start: str = "",
    best: str = "",
) -> SnapshotInventory:
    return SnapshotInventory(
        rank=rank,
        host=f"node{rank}",
        started=generation,
        step=step,
        generation=generation,
        start=start,
        manifest="" if step == NONE else manifest(step, salt),
        best=best,
    )


@pytest.mark.parametrize(
    ("nodes", "rank"),
    [
        ([holding(0), holding(1, 3, 1), holding(2, 9, 1)], 2),
        ([holding(0, 9, 1), holding(4, 9, 1)], 0),  # the lowest rank of equals
        ([holding(0, 9, 1), holding(1, 6, 2), holding(2, 3, 2)], 1),  # the start before the step
        ([holding(0, 9, 1, start="a"), holding(1, 9, 2, salt="1", start="b")], 1),
        ([holding(0, 9, 1, start="a"), holding(1, 9, 1, salt="1", start="a")], 0),
        ([holding(0, 0, 0), holding(1)], 0),  # a step 0, of a version that counted no starts
    ],
)
def test_whose_is_the_newest(nodes: list[SnapshotInventory], rank: int) -> None:
    found = newest(nodes)
    assert found is not None
    assert found.rank == rank


def test_nobody_has_any() -> None:
    assert newest([holding(0), holding(3)]) is None


@pytest.mark.parametrize("starts", [("a", "b"), ("", ""), ("a", "")])
def test_trained_apart(starts: tuple[str, str]) -> None:
    nodes = [holding(0, 9, 1, start=starts[0]), holding(1, 9, 1, salt="1", start=starts[1])]
    with pytest.raises(SnapshotError, match=r"node0 \(rank 0\) and node1 \(rank 1\) .* step 9"):
        newest(nodes)


def test_the_best_of_those_who_know_comes_first() -> None:
    nodes = [
        holding(0, 9, 1, best=manifest(8)),  # was away
        holding(1, 9, 2, best=manifest(3)),
        holding(2, 9, 2, best=manifest(6)),
        holding(3, 9, 2, best=manifest(6)),
        holding(4, 9, 2),
        holding(5, 12, 1, best=manifest(12)),  # later than what the training goes on from
    ]
    chosen = newest(nodes)
    assert chosen is nodes[1]
    found = choices_of_best(nodes, chosen)
    assert found == [(2, manifest(6)), (3, manifest(6)), (1, manifest(3)), (0, manifest(8))]


def test_what_a_node_tells_is_read_by_the_others() -> None:
    told = holding(2, 9, 1, start="é", best=manifest(3))
    assert SnapshotInventory.from_json(told.to_json()) == told
