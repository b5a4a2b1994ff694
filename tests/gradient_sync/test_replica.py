"""Gradients are those of plain DDP and of one process, however a model is used."""

import inspect

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.distributed.group import Group
from paceline.errors import JobError
from paceline.gradient_sync.powersgd import PowerSGD
from paceline.gradient_sync.replica import Replica
from tests.support.branches import (
    Branches,
    assert_close,
    bits,
    both,
    fresh,
    gradients,
    one_head,
    rows_of,
    scores_of,
)
from tests.support.ranks import RankError, run_ranks
from tests.support.replicas import Use, assert_steps_close, replica_of, train

WORLDS = [1, 2, 3]


def by_turns(model: Branches, rows: Tensor, step: int) -> Tensor:
    return scores_of(model, rows, spare=step % 2 == 1).square().mean()


def by_method(model: Branches, rows: Tensor, step: int) -> Tensor:
    return model.encode(rows).square().mean()


def by_submodule(model: Branches, rows: Tensor, step: int) -> Tensor:
    scores: Tensor = model.head(model.body(rows))
    return scores.square().mean()


def method_later(model: Branches, rows: Tensor, step: int) -> Tensor:
    """First everything, then only a part, and that by another way than calling the model."""
    return both(model, rows, step) if step == 0 else by_method(model, rows, step)


def method_first(model: Branches, rows: Tensor, step: int) -> Tensor:
    return by_method(model, rows, step) if step == 0 else one_head(model, rows, step)


USES = [both, one_head, by_turns, by_method, by_submodule, method_later, method_first]


@pytest.mark.ranks
@pytest.mark.parametrize(("columns", "worlds"), [(None, (2, 3)), (1000, (2,))])
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
@pytest.mark.core_cases(3)
def test_gradients_are_those_of_one_process_in_every_step(
    use: Use, columns: int | None, worlds: tuple[int, ...]
) -> None:
    (expected,) = run_ranks(1, train, use, columns)
    for world_size in worlds:
        assert_steps_close(run_ranks(world_size, train, use, columns), expected)


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_are_those_of_plain_ddp(world_size: int) -> None:
    def plain(group: Group) -> list[dict[str, Tensor | None]]:
        model = fresh()
        parallel = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for step in range(4):
            both(parallel, rows_of(group, step), step).backward()  # type: ignore[arg-type]
            found.append(gradients(model))
            optimizer.step()
            optimizer.zero_grad()
        return found

    expected, found = run_ranks(world_size, plain), run_ranks(world_size, train, both)
    for got, wanted in zip(found[0], expected[0], strict=True):
        assert_close(got, wanted)
    for other in found[1:]:  # equal bits on all workers
        for mine, theirs in zip(found[0], other, strict=True):
            assert bits(mine) == bits(theirs)


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, 3])
def test_buffers_stay_each_workers_own(world_size: int) -> None:
    def body(group: Group) -> tuple[Tensor, Tensor]:
        torch.manual_seed(group.rank)
        linear, norm = nn.Linear(3, 2), nn.BatchNorm1d(2)
        model = nn.Sequential(linear, norm)
        replica = Replica(model, group)
        for _ in range(2):  # a broadcast would come before the second pass
            model(torch.randn(5, 3) + group.rank).square().sum().backward()
            replica.finish_backward()
        assert norm.running_mean is not None
        return linear.weight.detach(), norm.running_mean

    results = run_ranks(world_size, body)
    for weight, mean in results[1:]:
        assert torch.equal(weight, results[0][0])
        assert not torch.equal(mean, results[0][1])


@pytest.mark.ranks
@pytest.mark.parametrize("columns", [None, 2])
def test_gradients_stay_local_until_they_are_to_be_exchanged(columns: int | None) -> None:
    def body(group: Group) -> list[float]:
        model = nn.Linear(1, 1, bias=False)
        replica = replica_of(model, group, columns)
        inputs = torch.full((1, 1), float(group.rank))
        seen = []
        for _ in range(2):  # the first step, and one through DistributedDataParallel
            model.zero_grad()
            for syncing in (False, True):
                replica.syncing = syncing
                model(inputs).sum().backward()
                if syncing:
                    replica.finish_backward()
                assert model.weight.grad is not None
                seen.append(float(model.weight.grad))
        return seen

    # Local sums 0 and 1 a pass; the last pass averages what has come together: (0 + 2) / 2.
    assert run_ranks(2, body) == [[0.0, 1.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]]


@pytest.mark.ranks
def test_unused_parameters_are_named_once_by_all() -> None:
    def body(group: Group) -> list[tuple[str, ...]]:
        model = fresh()
        replica = Replica(model, group)
        named = []
        for step in range(2):
            one_head(model, rows_of(group), step).backward()
            named.append(replica.finish_backward())
            assert model.spare.weight.grad is None  # the optimizer leaves it alone
        return named

    assert run_ranks(2, body) == [[("spare.weight", "spare.bias"), ()]] * 2


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, 3])
def test_what_one_worker_uses_counts_with_zero_from_the_others(world_size: int) -> None:
    def body(group: Group) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
        model = fresh()
        replica = Replica(model, group)
        found = []
        for _ in range(2):
            model.zero_grad()
            one_head_or_spare = model(rows_of(group), spare=group.rank == 0)["scores"]
            one_head_or_spare.sum().backward()
            assert replica.finish_backward() == ()
            found.append(gradients(model))
        return found[0], found[1]

    def alone(group: Group) -> dict[str, Tensor | None]:
        model = fresh()
        shares = [rows_of(group).chunk(world_size)[rank] for rank in range(world_size)]
        for rank, rows in enumerate(shares):
            (model(rows, spare=rank == 0)["scores"].sum() / world_size).backward()
        return gradients(model)

    (expected,) = run_ranks(1, alone)
    for first, second in run_ranks(world_size, body):
        assert_close(first, expected)
        assert_close(second, expected)


@pytest.mark.ranks
def test_a_worker_without_any_gradient_counts_with_zero() -> None:
    def body(group: Group) -> float:
        model = nn.Linear(1, 1, bias=False)
        replica = Replica(model, group)
        if group.rank == 1:
            model(torch.full((1, 1), 6.0)).sum().backward()
        replica.finish_backward()
        assert model.weight.grad is not None
        return float(model.weight.grad)

    assert run_ranks(3, body) == [2.0, 2.0, 2.0]


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.core_cases(2)
def test_two_backward_passes_before_an_update(world_size: int) -> None:
    """Both forward passes come first: DistributedDataParallel alone would lose the second."""

    def body(group: Group) -> dict[str, Tensor | None]:
        model = fresh()
        replica = Replica(model, group)
        for step in range(2):
            model.zero_grad()
            first = both(model, rows_of(group, step), step)
            second = both(model, rows_of(group, step + 9), step)
            for loss in (first, second):
                loss.backward()
                replica.finish_backward()
        return gradients(model)

    def alone(group: Group) -> dict[str, Tensor | None]:
        model = fresh()
        (both(model, rows_of(group, 1), 1) + both(model, rows_of(group, 10), 1)).backward()
        return gradients(model)

    (expected,) = run_ranks(1, alone)
    for found in run_ranks(world_size, body):
        assert_close(found, expected)


@pytest.mark.ranks
@pytest.mark.parametrize("columns", [None, 2])
def test_a_gradient_lost_later_is_an_error_that_names_it(columns: int | None) -> None:
    def body(group: Group) -> None:
        model = fresh()
        replica = replica_of(model, group, columns)
        for step in range(2):
            model.zero_grad()
            if step == 1 and group.rank == 1:
                one_head(model, rows_of(group), step).backward()
            else:
                both(model, rows_of(group), step).backward()
            replica.finish_backward()

    named = f"{JobError.__name__}: spare.weight, spare.bias got no gradient .* rank 1"
    with pytest.raises(RankError, match=named):
        run_ranks(2, body)


def test_what_got_no_gradient_is_said_once_and_an_abandoned_step_counts_for_nothing() -> None:
    def body(group: Group) -> tuple[tuple[str, ...], tuple[str, ...], set[str]]:
        model = nn.ModuleDict({"used": nn.Linear(2, 1), "spare": nn.Linear(2, 1)})
        replica = Replica(model, group, forward=lambda inputs: model["used"](inputs))
        model(torch.ones(1, 2)).sum().backward()
        first = replica.finish_backward()
        model(torch.ones(1, 2)).sum().backward()
        second = replica.finish_backward()
        replica.defer_to(PowerSGD(group.world_size, 1))
        model(torch.ones(1, 2)).sum().backward()
        replica.reset()
        return first, second, set(replica._reached)

    for first, second, reached in run_ranks(2, body):
        assert set(first) == {"spare.weight", "spare.bias"}
        assert second == ()
        assert reached == set()


class Wave(nn.Module):
    """Has complex parameters, and an argument that callers look for."""

    def __init__(self) -> None:
        super().__init__()
        self.wave = nn.Parameter(torch.tensor([[1.0 + 2.0j], [0.5 - 1.0j], [-1.0 + 0.5j]]))
        self.line = nn.Linear(3, 1)
        nn.init.ones_(self.line.weight)

    def forward(self, rows: Tensor, scale: float = 1.0) -> Tensor:
        found: Tensor = (rows.to(torch.complex64) @ self.wave).abs() * scale + self.line(rows)
        return found


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("steps", [1, 3])
def test_complex_parameters_have_the_gradients_of_one_process(world_size: int, steps: int) -> None:
    rows = torch.randn(steps, 6, 3, generator=torch.Generator().manual_seed(1))

    def run(group: Group | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = Wave()
        replica = Replica(model, group) if group else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in rows:
            optimizer.zero_grad()
            mine = batch.chunk(group.world_size)[group.rank] if group else batch
            model(mine).square().mean().backward()
            if replica is not None:
                replica.finish_backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    for found in run_ranks(world_size, run):
        for got, expected in zip(found, run(None), strict=True):
            torch.testing.assert_close(got, expected)


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", WORLDS)
def test_a_forward_pass_keeps_its_signature(world_size: int) -> None:
    """Libraries decide by it which arguments a model gets."""

    def body(group: Group) -> list[str]:
        model = Wave()
        Replica(model, group)
        return list(inspect.signature(model.forward).parameters)

    assert run_ranks(world_size, body) == [["rows", "scale"]] * world_size
