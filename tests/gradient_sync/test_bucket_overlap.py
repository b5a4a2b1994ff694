"""What leaves during the backward pass is what would have left after it, bit by bit."""

from collections.abc import Callable, Collection, Sequence
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.distributed.group import Group
from paceline.distributed.node_memory import connect_node
from paceline.errors import UsageError
from paceline.gradient_sync.bucket_overlap import BucketOverlap
from paceline.gradient_sync.node_average import NodeAverage
from paceline.gradient_sync.powersgd import PowerSGD
from paceline.gradient_sync.replica import Replica
from tests.support.branches import bits, gradients
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks


class Deep(nn.Module):
    """Matrices of several sizes; the middle one is used twice, in segments of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 50), nn.Linear(50, 30)
        self.middle = nn.Linear(50, 50)
        self.twice = False

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for _ in range(1 + self.twice):
            hidden = checkpoint(self.middle, hidden, use_reentrant=self.twice)
        outputs: Tensor = self.last(hidden.tanh())
        return outputs


@pytest.mark.parametrize("twice", [False, True])
def test_buckets_leave_during_the_backward_pass_with_the_same_bits(twice: bool) -> None:
    """Not where one pass gives a parameter several gradients."""

    def body(group: Group) -> list[list[str]]:
        torch.manual_seed(0)
        model, twin = Deep(), Deep()
        twin.load_state_dict(model.state_dict())
        model.twice = twin.twice = twice
        averager, other = PowerSGD(group.world_size, 2), PowerSGD(group.world_size, 2)
        when: list[list[str]] = []
        start, running = averager.start, False

        def noted(names: Sequence[str], gradients: list[Tensor]) -> None:
            when[-1].append("during" if running else "after")
            start(names, gradients)

        # A spy: it notes when the real one is called.
        averager.start = noted  # type: ignore[method-assign]
        replica = Replica(model, group)
        replica.defer_to(averager)
        for step in range(4):
            when.append([])
            draw = torch.Generator().manual_seed(10 * step + group.rank)
            inputs = torch.randn(5, 6, generator=draw)
            running = True
            model(inputs).square().mean().backward()
            running = False
            replica.finish_backward()
            twin(inputs).square().mean().backward()
            found = {name: cast(Tensor, p.grad) for name, p in twin.named_parameters()}
            other.average_(found)
            assert bits(gradients(model)) == bits(dict(found))
            model.zero_grad()
            twin.zero_grad()
        replica.release()
        averager.release()
        return when

    for when in run_ranks(2, body):
        first, *later = [set(step) for step in when]
        assert first == {"after"}
        assert later == [{"after" if twice else "during"}] * 3
        assert len(when[-1]) > 1


class Position(nn.Module):
    """Adds a parameter to each sample: with one sample its gradient is the very one that goes on
    to the layer before."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(12, 50))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.place[None]


Made = Callable[[Group, nn.Module], PowerSGD | NodeAverage]


def approximately(group: Group, _model: nn.Module) -> PowerSGD:
    return PowerSGD(group.world_size, 2)


def in_memory(group: Group, model: nn.Module) -> NodeAverage:
    memory = connect_node(group)
    assert memory is not None
    return NodeAverage(memory, model)


def averaged_by(
    group: Group,
    model: nn.Module,
    make: Made,
    passes: Callable[[nn.Module, int], None],
    *,
    early: bool,
) -> list[dict[str, bytes | None]]:
    """Four steps, in which buckets may leave during the backward pass."""
    averager = make(group, model)
    replica = Replica(model, group)
    replica.defer_to(averager)
    if not early:
        replica._has_looked_at_a_pass = True
    found = []
    for step in range(4):
        replica.syncing = True
        passes(model, 10 * step + group.rank)
        replica.finish_backward()
        found.append(bits(gradients(model)))
    assert (replica._departures is not None) == early
    replica.release()
    averager.release()
    return found


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_shared_memory(model: nn.Module, seed: int) -> None:
    model.zero_grad()
    model(drawn(seed, 1, 12, 6)).square().mean().backward()


def twice(model: nn.Module, seed: int) -> None:
    """A script's own backward pass comes first, for nothing or for more; not in the first step."""
    model.zero_grad()
    for number in range(1 + (seed >= 10)):
        model(drawn(seed + 7 * number, 3, 12, 6)).square().mean().backward()
        if seed % 20 < 10 and not number:
            model.zero_grad()


def zeroed(model: nn.Module, seed: int) -> None:
    """Gradients come into the memory of those of the step before; from the third step on twice."""
    model.zero_grad(set_to_none=False)
    for number in range(1 + (seed >= 20)):
        model(drawn(seed + 7 * number, 3, 12, 6)).square().mean().backward()


def zeroed_by_other_tensors(model: nn.Module, seed: int) -> None:
    """As `zeroed`; the gradients are new tensors of the same memory."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.detach().zero_()
    for number in range(1 + (seed >= 20)):
        model(drawn(seed + 7 * number, 3, 12, 6)).square().mean().backward()


def zeroed_in_part(model: nn.Module, seed: int, layer: int = -1) -> None:
    """Those gradients that come first are added to the memory of the step before."""
    some = list(model.children())[layer]
    kept = [parameter.grad for parameter in some.parameters()]
    model.zero_grad()
    for parameter, gradient in zip(some.parameters(), kept, strict=True):
        parameter.grad = None if gradient is None else gradient.zero_()
    for number in range(1 + (seed >= 20)):
        model(drawn(seed + 7 * number, 3, 12, 6)).square().mean().backward()


def zeroed_in_the_middle(model: nn.Module, seed: int) -> None:
    """The same of those in between, as new tensors of the same memory."""
    for number, layer in enumerate(children := list(model.children())):
        for parameter in layer.parameters():
            old = parameter.grad if 0 < number < len(children) - 1 else None
            parameter.grad = None if old is None else old.detach().zero_()
    for number in range(1 + (seed >= 20)):
        model(drawn(seed + 7 * number, 3, 12, 6)).square().mean().backward()


def zeroed_at_the_end(model: nn.Module, seed: int) -> None:
    """The same of those that come last."""
    zeroed_in_part(model, seed, 0)


def autocasted(model: nn.Module, seed: int) -> None:
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(drawn(seed, 3, 12, 6)).square().mean().backward()


@pytest.mark.parametrize(
    "passes",
    [
        with_shared_memory,
        twice,
        zeroed,
        zeroed_by_other_tensors,
        zeroed_in_part,
        zeroed_in_the_middle,
        zeroed_at_the_end,
        autocasted,
    ],
    ids=lambda passes: passes.__name__,
)
@pytest.mark.parametrize("make", [in_memory, approximately], ids=lambda make: make.__name__)
@pytest.mark.core_cases(4)
def test_what_leaves_early_is_what_would_have_left_late(
    make: Made, passes: Callable[[nn.Module, int], None]
) -> None:
    def body(group: Group, early: bool) -> list[dict[str, bytes | None]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 50), nn.Tanh(), Position(), nn.Linear(50, 30))
        return averaged_by(group, model, make, passes, early=early)

    early, late = run_ranks(2, body, True), run_ranks(2, body, False)
    assert early == late


@pytest.mark.slow
def test_a_parameter_that_only_an_earlier_piece_has_reached_leaves_last() -> None:
    """On one worker, or on both."""

    def body(group: Group, early: bool, ranks: Collection[int]) -> list[dict[str, bytes | None]]:
        torch.manual_seed(0)
        model = nn.ModuleDict({"main": nn.Linear(20, 40), "other": nn.Linear(20, 40)})
        averager = PowerSGD(group.world_size, 2)
        both = cast(Callable[[Tensor], Tensor], lambda x: model["main"](x) + model["other"](x))
        replica = Replica(model, group, forward=both)
        replica.defer_to(averager)
        replica._has_looked_at_a_pass = not early
        found = []
        for step in range(4):
            for syncing in (False, True):
                replica.syncing = syncing
                inputs = drawn(10 * step + group.rank + 5 * syncing, 3, 20)
                model["other"].requires_grad_(True)
                outputs = model(inputs)
                if syncing and step == 2 and group.rank in ranks:
                    outputs = outputs - model["other"](inputs)
                    outputs = model["main"](inputs)
                outputs.square().mean().backward()
            replica.finish_backward()
            found.append(bits(gradients(model)))
            model.zero_grad()
        replica.release()
        averager.release()
        return found

    for ranks in ((0,), (0, 1)):
        assert run_ranks(2, body, True, ranks) == run_ranks(2, body, False, ranks)


class Sum(nn.Module):
    """Two layers, whose gradients come in the one order or the other."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 3), nn.Linear(6, 3)
        self.turned = False

    def forward(self, inputs: Tensor) -> Tensor:
        layers = (self.other, self.one) if self.turned else (self.one, self.other)
        outputs: Tensor = layers[0](inputs).tanh() + layers[1](inputs)
        return outputs


def test_gradients_of_a_pass_that_were_dropped_dont_leave_in_the_next_one() -> None:
    """Also where they came in another order than in the first step, so that nothing looked."""

    def body(group: Group) -> list[dict[str, bytes | None]]:
        torch.manual_seed(0)
        found, model = [], Sum()
        averager = in_memory(group, model)
        replica = Replica(model, group)
        replica.defer_to(averager)
        for probes in (False, False, True):
            inputs = drawn(group.rank, 3, 6)
            if probes:
                model.turned = True
                model(inputs).square().mean().backward()
                model.zero_grad()
                model.turned = False
            model(inputs).square().mean().backward()
            replica.finish_backward()
            found.append(bits(gradients(model)))
            model.zero_grad()
        replica.release()
        averager.release()
        return found

    for usual, early, behind_probe in run_ranks(2, body):
        assert usual == early == behind_probe


@pytest.mark.parametrize("zeroed", [False, True])
def test_a_gradient_that_a_hook_drops_is_refused(zeroed: bool) -> None:
    """Also where the average is kept and set to zero, so that nothing leaves before the end."""

    def body(group: Group) -> None:
        model = Sum()
        averager = in_memory(group, model)
        replica = Replica(model, group)
        replica.defer_to(averager)
        for _ in range(2):
            model(torch.ones(1, 6)).sum().backward()
            replica.finish_backward()
            model.zero_grad(set_to_none=not zeroed)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))

        def step() -> None:
            model(torch.ones(1, 6)).sum().backward()
            replica.finish_backward()

        with pytest.raises(UsageError, match="is gone within the backward pass"):
            step()
        replica.release()
        averager.release()

    run_ranks(2, body)


def test_a_pass_is_looked_at_where_buckets_end() -> None:
    def body(group: Group) -> tuple[list[str], list[str]]:
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(12)))
        parameters = dict(model.named_parameters())
        order = list(parameters)[::-1]
        averager = in_memory(group, model)
        ends = BucketOverlap(averager, parameters).looks_at(order)
        averager.buckets = lambda like: [order[:5], order[5:]]  # type: ignore[method-assign, assignment]
        more = BucketOverlap(averager, parameters).looks_at(order)
        averager.release()
        return ends, more

    for ends, more in run_ranks(2, body):
        assert ends == ["0.weight"]  # one bucket
        assert {"9.bias", "0.weight"} <= set(more)
        assert len(more) < 12


def test_passes_that_only_add_up_dont_keep_buckets_from_leaving() -> None:
    def body(group: Group) -> bool:
        model, averager = nn.Linear(6, 50), PowerSGD(group.world_size, 2)
        replica = Replica(model, group)
        replica.defer_to(averager)
        for syncing in (False, True):
            replica.syncing = syncing
            model(torch.ones(2, 6)).sum().backward()
        replica.finish_backward()
        leave = replica._departures is not None
        replica.release()
        averager.release()
        return leave

    assert run_ranks(2, body) == [True, True]


def test_what_was_abandoned_counts_for_nothing() -> None:
    def body(group: Group) -> list[bytes | None]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 50), nn.Linear(50, 30))
        averager, other = PowerSGD(group.world_size, 2), PowerSGD(group.world_size, 2)
        replica = Replica(model, group)
        replica.defer_to(averager)
        for step in range(3):
            if step == 2:  # everything has left by then
                model(torch.ones(2, 6)).sum().backward()
                model.zero_grad()
                replica.reset()
            model(drawn(step + 10 * group.rank, 3, 6)).square().mean().backward()
            found = {n: cast(Tensor, p.grad).clone() for n, p in model.named_parameters()}
            other.average_(found)
            replica.finish_backward()
            assert bits(gradients(model)) == bits(dict(found))
            model.zero_grad()
        return []

    run_ranks(2, body)


def test_what_was_abandoned_keeps_the_error_of_what_is_approximated_no_more() -> None:
    def body(group: Group) -> Tensor:
        two, averager = PowerSGD(group.world_size, 2), PowerSGD(group.world_size, 1000)
        two.begin("wide", torch.zeros(24, 40)).error.fill_(3.0)
        averager.low_rank = two.low_rank
        own = {"wide": torch.ones(24, 40)}
        averager.start(["wide"], [own["wide"]])
        averager.finish(keep=False)
        averager.average_(own)
        averager.average_(own)
        return own["wide"]

    for found in run_ranks(2, body):
        assert torch.equal(found, torch.full((24, 40), 4.0))
