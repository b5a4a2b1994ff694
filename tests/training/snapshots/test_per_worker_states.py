"""What each worker has of its own comes together bit by bit."""

import pytest
import torch

from paceline.distributed.group import Group
from paceline.training.snapshots import per_worker_states
from paceline.training.snapshots.per_worker_states import RankState, gather_states, merged
from tests.support.ranks import run_ranks


def own(rank: int) -> RankState:
    generator = torch.Generator().manual_seed(rank)
    tensors = {
        "flag": torch.tensor([True, rank == 1]),
        "image": torch.randn(2, 3, 4, 5, generator=generator).to(memory_format=torch.channels_last),
        "half": torch.randn(3, generator=generator).to(torch.bfloat16),
        "count": torch.tensor(2**53 + 1 + rank),
        "empty": torch.empty(0, 3),
        "nan": torch.tensor(float("nan"), dtype=torch.float64),
    }
    if rank == 1:
        tensors["more"] = torch.arange(5)
    return RankState(tensors=tensors, values={"rank": rank, "of": [1, "a", None]})


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_states_are_gathered_as_they_are(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(per_worker_states, "_CHUNK_BYTES", 7)  # in many messages

    def body(group: Group) -> list[tuple[dict[str, bytes], object]]:
        states = gather_states(group, own(group.rank), keeps=group.rank != 1)
        found: list[tuple[dict[str, bytes], object]] = []
        for state in states:
            packed = {
                f"{n} {t.dtype} {tuple(t.shape)}": t.reshape(-1).view(torch.uint8).numpy().tobytes()
                for n, t in state.tensors.items()
            }
            found.append((packed, dict(state.values)))
        return found

    def packed(rank: int) -> tuple[dict[str, bytes], object]:
        state = own(rank)
        flat = {n: t.contiguous().reshape(-1).view(torch.uint8) for n, t in state.tensors.items()}
        named = {f"{n} {t.dtype} {tuple(t.shape)}": n for n, t in state.tensors.items()}
        return {k: flat[n].numpy().tobytes() for k, n in named.items()}, dict(state.values)

    expected = [packed(rank) for rank in range(world_size)]
    for rank, found in enumerate(run_ranks(world_size, body)):
        assert found == ([] if rank == 1 else expected)


@pytest.mark.ranks
def test_nothing_of_ones_own() -> None:
    def body(group: Group) -> list[RankState]:
        return gather_states(group, RankState(tensors={}), keeps=True)

    for found in run_ranks(2, body):
        assert [dict(state.tensors) for state in found] == [{}, {}]


def test_the_first_that_has_something_counts() -> None:
    assert merged([{"a": 1}, {"b": 2, "a": 3}, {"c": 4, "b": 5}]) == {"a": 1, "b": 2, "c": 4}
