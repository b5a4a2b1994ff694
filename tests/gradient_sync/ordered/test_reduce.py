"""Gradients of shards have the same bits on any number of workers: those of a naive sum."""

import gc
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from paceline.distributed.group import Group
from paceline.distributed.placement import Placement
from paceline.errors import UsageError
from paceline.gradient_sync.ordered.reduce import OrderedSum
from tests.support.ranks import run_ranks
from tests.support.shards import (
    Net,
    assert_same_bits,
    expected_sums,
    fresh_net,
    gradients_of,
    loss_of,
    nested_sum,
    run_step,
)

SPREADS = [(v, n) for v in (1, 2, 3, 5, 8, 16) for n in range(1, min(v, 8) + 1)]


def sums_of(model: nn.Module) -> dict[str, Tensor | None]:
    return gradients_of(dict(model.named_parameters()))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("shards", "workers", "nodes"),
    [*((v, n, 1) for v, n in SPREADS), (2, 2, 2), (5, 3, 3), (16, 4, 2), (7, 5, 5)],
)
@pytest.mark.slow
def test_sums_are_those_of_one_process_bit_by_bit(shards: int, workers: int, nodes: int) -> None:
    """By the node's memory, and by what connects nodes."""

    def body(group: Group) -> None:
        group.placement = replace(group.placement, nodes=nodes)
        model = fresh_net()
        for bucket_bytes in (None, 300):
            ordered = OrderedSum(group, shards, bucket_bytes=bucket_bytes)
            for step in range(3):
                loss = partial(loss_of, step=step)
                wanted = expected_sums(model, shards, loss)
                unused = run_step(ordered, model, loss)
                assert_same_bits(sums_of(model), wanted)
                assert unused == (("spare.weight", "spare.bias") if step == 0 else ())
                with torch.no_grad():
                    for parameter in model.parameters():
                        if parameter.grad is not None:
                            parameter.sub_(0.01 * parameter.grad)
            ordered.release()

    run_ranks(workers, body)


@pytest.mark.ranks
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "empties",
    [
        [(4,), (3, 4), (1, 2, 3, 4)],
        [(0,), (), (0, 1)],
        [(1, 2, 3, 4), (), (4,)],
        [(0, 1, 2, 3, 4), (4,), (0, 1, 2, 3, 4)],
    ],
)
@pytest.mark.core_cases(2)
def test_empty_shards_are_zeros(workers: int, empties: list[tuple[int, ...]]) -> None:
    def body(group: Group) -> list[tuple[str, ...]]:
        model, told = fresh_net(), []
        ordered = OrderedSum(group, 5, bucket_bytes=1000)
        for step, empty in enumerate(empties):
            wanted = expected_sums(model, 5, empty=empty)
            if step and len(empty) == 5:  # what has a gradient is known by then
                wanted = {
                    n: None if "spare" in n else torch.zeros_like(p)
                    for n, p in model.named_parameters()
                }
            told.append(run_step(ordered, model, empty=empty))
            assert_same_bits(sums_of(model), wanted)
        return told

    for told in run_ranks(workers, body):
        assert [names for names in told if names] == [("spare.weight", "spare.bias")]


@pytest.mark.ranks
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.core_cases(2)
def test_pieces_of_a_shard_are_added_up_by_autograd(workers: int) -> None:
    def body(group: Group) -> None:
        model = fresh_net()

        def both(module: nn.Module, shard: int) -> Tensor:
            loss_of(module, shard, 0).backward()  # the first piece
            return loss_of(module, shard, 1)

        ordered = OrderedSum(group, 4, bucket_bytes=1000)
        for _ in range(2):
            wanted = expected_sums(model, 4, both)
            ordered.begin_step(dict(model.named_parameters()))
            for shard in ordered.own_shards:
                for piece in range(2):
                    loss = loss_of(model, shard, piece)
                    ordered.open_shard(shard, last=piece == 1)
                    loss.backward()
                ordered.close_shard()
            ordered.finish()
            assert_same_bits(sums_of(model), wanted)

    run_ranks(workers, body)


@pytest.mark.ranks
@pytest.mark.parametrize("workers", [1, 2])
def test_a_parameter_that_only_an_early_piece_uses_counts(workers: int) -> None:
    def body(group: Group) -> None:
        model = fresh_net()
        ordered = OrderedSum(group, 2)
        for _ in range(2):
            ordered.begin_step(dict(model.named_parameters()))
            for shard in ordered.own_shards:
                loss = model.spare(torch.ones(1, 3)).sum()
                ordered.open_shard(shard, last=False)
                loss.backward()
                loss = loss_of(model, shard)
                ordered.open_shard(shard)
                loss.backward()
                ordered.close_shard()
            assert ordered.finish() == ()
            assert model.spare.bias.grad is not None
            assert model.spare.bias.grad.tolist() == [2.0, 2.0, 2.0]

    run_ranks(workers, body)


@pytest.mark.ranks
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.core_cases(2)
def test_frozen_and_thawed_parameters_are_heeded(workers: int) -> None:
    def body(group: Group) -> list[tuple[str, ...]]:
        model, told = fresh_net(), []
        ordered = OrderedSum(group, 3, bucket_bytes=2000)
        for frozen in ([model.first], [], [model.head, model.spare], [model.first], [], []):
            model.requires_grad_(True)
            for part in frozen:
                part.requires_grad_(False)
            wanted = expected_sums(model, 3)
            told.append(run_step(ordered, model))
            assert_same_bits(sums_of(model), wanted)
        return told

    spare = ("spare.weight", "spare.bias")
    for told in run_ranks(workers, body):
        assert told == [spare, spare, (), (), (), ()]


@pytest.mark.ranks
@pytest.mark.parametrize("workers", [1, 2])
def test_several_models_and_later_ones_are_summed_together(workers: int) -> None:
    def body(group: Group) -> None:
        models = nn.ModuleDict({"a": fresh_net(1)})
        ordered = OrderedSum(group, 2)

        def loss(module: nn.Module, shard: int) -> Tensor:
            losses = [loss_of(part, shard) for part in module.children()]
            return torch.stack(losses).sum()

        for step in range(4):
            if step == 2:
                models["b"] = fresh_net(2)
            wanted = expected_sums(models, 2, loss)
            run_step(ordered, models, loss)
            assert_same_bits(sums_of(models), wanted)

    run_ranks(workers, body)


class Odd(nn.Module):
    """Parameters of several types, one of them shared, one without elements, one a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.of_bf16 = nn.Parameter(torch.randn(5, dtype=torch.bfloat16))
        self.of_fp64 = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.single = nn.Parameter(torch.randn(()))
        self.shared = self.single
        self.none = nn.Parameter(torch.zeros(0, 4))
        self.strided = nn.Parameter(torch.randn(4, 3).t())

    def forward(self, scale: Tensor) -> Tensor:
        parts = [(p.float() * scale).sin().sum() for p in self.parameters()]
        return torch.stack(parts).sum() + self.shared.sin()


@pytest.mark.ranks
@pytest.mark.parametrize(("shards", "workers"), [(1, 1), (5, 1), (5, 2), (5, 3), (8, 4)])
@pytest.mark.core_cases(2)
def test_types_are_summed_in_their_own_precision(shards: int, workers: int) -> None:
    def loss(module: nn.Module, shard: int) -> Tensor:
        value: Tensor = module(torch.tensor(1.0 + shard))
        return value

    def body(group: Group) -> None:
        torch.manual_seed(0)
        model = Odd()
        ordered = OrderedSum(group, shards)
        for _ in range(2):
            wanted = expected_sums(model, shards, loss)
            run_step(ordered, model, loss)
            assert_same_bits(sums_of(model), wanted)
            for parameter in model.parameters():
                assert parameter.grad is not None
                assert parameter.grad.dtype == parameter.dtype
                assert parameter.grad.stride() == parameter.stride()

    run_ranks(workers, body)


@pytest.mark.ranks
@pytest.mark.parametrize("workers", [1, 2])
def test_gradients_have_the_memory_format_of_the_weights(workers: int) -> None:
    def body(group: Group) -> None:
        model = fresh_net().to(memory_format=torch.channels_last)
        assert not model.second.weight.is_contiguous()
        ordered = OrderedSum(group, 2)
        for _ in range(2):
            wanted = expected_sums(model, 2)
            run_step(ordered, model)
            assert_same_bits(sums_of(model), wanted)
            assert model.second.weight.grad is not None
            assert model.second.weight.grad.stride() == model.second.weight.stride()

    run_ranks(workers, body)


SPECIAL = [
    [-0.0, -0.0, -0.0, 1.0],
    [-0.0, 0.0, float("inf"), float("nan")],
    [-0.0, -0.0, float("-inf"), 2.0**-149],
]


@pytest.mark.ranks
@pytest.mark.parametrize(("shards", "workers"), [(1, 1), (3, 1), (3, 2), (3, 3)])
def test_zeros_keep_their_sign_and_no_special_value_is_lost(shards: int, workers: int) -> None:
    def body(group: Group) -> None:
        weight = nn.Parameter(torch.zeros(4))
        ordered = OrderedSum(group, shards)
        for _ in range(2):
            ordered.begin_step({"weight": weight})
            for shard in ordered.own_shards:
                ordered.open_shard(shard)
                weight.backward(torch.tensor(SPECIAL[shard]))
                ordered.close_shard()
            ordered.finish()
            wanted = nested_sum([torch.tensor(row) for row in SPECIAL[:shards]])
            assert_same_bits({"weight": weight.grad}, {"weight": wanted})

    run_ranks(workers, body)


@pytest.mark.ranks
@pytest.mark.parametrize(("shards", "workers"), [(1, 1), (8, 1), (8, 2), (8, 4), (8, 8), (16, 2)])
@pytest.mark.core_cases(2)
def test_memory_is_that_of_a_few_gradients(shards: int, workers: int) -> None:
    """Those of the subtrees that wait, the shard's own, and what is received."""

    def body(group: Group) -> tuple[int, int]:
        model = Wide()
        ordered = OrderedSum(group, shards, bucket_bytes=4 * 64 * 64)
        for _ in range(3):
            run_step(ordered, model, lambda m, s: m(torch.ones(1, 64) * s).sum())
        return ordered.held_bytes, sum(p.nbytes for p in model.parameters())

    for held, size in run_ranks(workers, body):
        waiting = (shards // workers).bit_length() - 1
        assert held <= (waiting + (2 if workers > 1 else 1)) * size


@pytest.mark.ranks
@pytest.mark.parametrize("workers", [1, 2])
def test_layers_that_are_thawed_in_turn_leave_no_memory_behind(workers: int) -> None:
    """What is left is of two sets of parameters, as many as are trained by turns."""

    def body(group: Group) -> list[int]:
        model, held = Wide(), []
        ordered = OrderedSum(group, 2)
        for turn in range(9):
            for number, layer in enumerate(model):
                layer.requires_grad_(number == turn % len(model))
            wanted = expected_sums(model, 2, wide_loss)
            run_step(ordered, model, wide_loss)
            found = sums_of(model)
            assert_same_bits({n: found[n] for n in wanted}, wanted)
            model.zero_grad(set_to_none=True)
            del found, wanted
            held.append(tensor_bytes())
        ordered.release()
        return held

    for held in run_ranks(workers, body):
        # A few small messages are remembered; a buffer is as large as a layer, 16 KiB.
        assert max(held[3:]) < held[2] + 4096


def wide_loss(model: nn.Module, shard: int) -> Tensor:
    loss: Tensor = model(torch.ones(1, 64) * (shard + 1)).sum()
    return loss


def tensor_bytes() -> int:
    """Sum the memory that all tensors of this process hold, each once."""
    gc.collect()
    every = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    storages = [tensor.untyped_storage() for tensor in every]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class Wide(nn.Sequential):
    """Parameters of sizes that need no padding."""

    def __init__(self) -> None:
        super().__init__(*[nn.Linear(64, 64, bias=False) for _ in range(4)])


@pytest.mark.ranks
@pytest.mark.parametrize("workers", [1, 2])
def test_a_step_that_was_left_early_leaves_nothing_behind(workers: int) -> None:
    def body(group: Group) -> None:
        model = fresh_net()
        ordered, wanted = OrderedSum(group, 4), expected_sums(model, 4)
        run_step(ordered, model)
        held = ordered.held_bytes
        ordered.begin_step(dict(model.named_parameters()))
        loss = loss_of(model, ordered.own_shards[0], 9)
        ordered.open_shard(ordered.own_shards[0])
        loss.backward()
        ordered.close_shard()
        run_step(ordered, model)
        assert_same_bits(sums_of(model), wanted)
        assert ordered.held_bytes == held

    run_ranks(workers, body)


@pytest.mark.ranks
@pytest.mark.parametrize("workers", [1, 2])
def test_gradients_that_were_there_before_a_shard_dont_count(workers: int) -> None:
    """As a script sets them by hand, where autograd runs no hook."""

    def body(group: Group) -> None:
        model = fresh_net()
        ordered, wanted = OrderedSum(group, 4), expected_sums(model, 4)

        def loss(net: nn.Module, shard: int) -> Tensor:
            for parameter in net.parameters():
                parameter.grad = torch.full_like(parameter, 100.0)
            return loss_of(net, shard)

        for _ in range(3):
            run_step(ordered, model, loss)
            assert_same_bits(gradients_of(dict(model.named_parameters())), wanted)

    run_ranks(workers, body)


@pytest.mark.parametrize("workers", [1, 2])
def test_released_parameters_are_anyones(workers: int) -> None:
    def body(group: Group) -> None:
        model = fresh_net()
        ordered = OrderedSum(group, 2)
        run_step(ordered, model)
        run_step(ordered, model)
        kept = sums_of(model)
        ordered.release()
        assert_same_bits(sums_of(model), kept)
        for _ in range(2):
            loss_of(model, 0).backward()
        assert ordered.held_bytes == 0

    run_ranks(workers, body)


def test_a_backend_without_all_to_all_is_refused() -> None:
    group = Group(Placement(rank=0, world_size=2), torch.device("cpu"), "smddp")
    with pytest.raises(UsageError, match="needs all-to-all, which --backend smddp"):
        OrderedSum(group, 2)


def test_one_worker_alone_needs_no_backend() -> None:
    group = Group(Placement(), torch.device("cpu"), "smddp")
    model = Net()
    wanted = expected_sums(model, 2)
    run_step(OrderedSum(group, 2), model)
    assert_same_bits(sums_of(model), wanted)


@pytest.mark.ranks
@pytest.mark.parametrize(("workers", "sent"), [(1, 0), (2, 1), (4, 1.5), (3, 4 / 3)])
@pytest.mark.core_cases(2)
def test_bytes_on_the_wire(workers: int, sent: float) -> None:
    """A worker sends the others a slice of each of its sums; then the slices go around."""

    def body(group: Group) -> float:
        ordered, model = OrderedSum(group, 4), fresh_net()
        assert ordered.wire_bytes == 0
        run_step(ordered, model, partial(loss_of, step=0))
        layout = ordered._layout
        assert layout is not None
        return ordered.wire_bytes / sum(b.size * b.dtype.itemsize for b in layout.buckets)

    # Of 4 shards 3 workers have 2, 1 and 1; two neighbours that begin a pair are one sum.
    assert run_ranks(workers, body) == pytest.approx([sent] * workers)
