"""One state for all workers' optimizers."""

import pytest
import torch
from torch import Tensor, nn

from paceline.distributed.group import Group
from paceline.training.snapshots.per_worker_states import RankState
from paceline.training.sync import optimizer_averaging
from paceline.training.sync.optimizer_averaging import OptimizerAverager, mean_state
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2))


def trained(group: Group, kind: str, *, spare: bool) -> tuple[list[Tensor], list[object], float]:
    """Step a few times on each worker's own data, then agree; gives the state before and after."""
    model = model_of().to(memory_format=torch.channels_last)
    options: dict[str, float] = {"lr": 0.1, **({"momentum": 0.9} if kind == "SGD" else {})}
    optimizer: torch.optim.Optimizer = getattr(torch.optim, kind)(model.parameters(), **options)
    for step in range(3 + group.rank):  # in fp16 a worker may have left a step out
        optimizer.zero_grad()
        torch.manual_seed(10 * step + group.rank)
        outputs = model(torch.randn(2, 1, 4, 4))
        outputs.square().sum().backward()
        if spare and group.rank == 0:
            model[2].weight.grad = None
        optimizer.step()
    named = dict(model.named_parameters())

    def tensors() -> list[Tensor]:
        state = [optimizer.state[p] for p in named.values() if p in optimizer.state]
        return [t.clone() for slots in state for t in slots.values() if isinstance(t, Tensor)]

    before, mean = tensors(), OptimizerAverager(group)
    mean.agree(optimizer, named)
    return before, list(tensors()), mean.sent_bytes


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_states_become_their_mean_and_counts_rank_0s(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer_averaging, "_CHUNK_ELEMENTS", 10)  # in several messages
    for world_size in (1, 3):
        found = run_ranks(world_size, lambda group: trained(group, kind, spare=False))
        earlier = list(zip(*(before for before, _, _ in found), strict=True))
        for _, after, sent in found:
            for got, rows in zip(after, earlier, strict=True):
                assert isinstance(got, Tensor)
                wanted = rows[0] if got.numel() == 1 else torch.stack(rows).mean(0)
                torch.testing.assert_close(got, wanted)
            floats = sum(rows[0].nbytes for rows in earlier if rows[0].numel() > 1)
            assert sent == pytest.approx(2 * (world_size - 1) / world_size * floats)
        for _, after, _ in found[1:]:
            assert all(map(torch.equal, after, found[0][1]))  # type: ignore[arg-type]


def test_a_state_that_only_some_have_is_the_mean_of_theirs() -> None:
    found = run_ranks(3, lambda group: trained(group, "Adam", spare=True))
    assert len(found[0][0]) < len(found[1][0])
    for _, after, _ in found:
        assert len(after) == len(found[1][0])
        assert all(map(torch.equal, after, found[0][1]))  # type: ignore[arg-type]


def test_means_of_flattened_states() -> None:
    first = RankState(
        tensors={"w/step": torch.tensor(3.0), "w/m": torch.tensor([1.0, 2.0])},
        values={"optimizer": "A", "groups": [], "values": {"w": {"k": 1}}},
    )
    second = RankState(
        tensors={
            "w/step": torch.tensor(4.0),
            "w/m": torch.tensor([3.0, 4.0]),
            "v/m": torch.tensor([5.0]),
            "w/n": torch.tensor([7]),
            "/groups/0/lr": torch.tensor(0.5),
        },
        values={"optimizer": "A", "groups": [], "values": {"w": {"k": 2}, "v": {"k": 3}}},
    )
    mean = mean_state([first, second])
    assert {n: t.tolist() for n, t in mean.tensors.items()} == {
        "w/step": 3.0,
        "w/m": [2.0, 3.0],
        "v/m": [5.0],
        "w/n": [7],
        "/groups/0/lr": 0.5,
    }
    assert mean.values == {"optimizer": "A", "groups": [], "values": {"w": {"k": 1}, "v": {"k": 3}}}
