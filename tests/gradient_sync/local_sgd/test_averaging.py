"""Local steps: what is computed is what the algorithm says, and the same every time."""

import json
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from paceline.distributed.group import Group
from paceline.errors import JobError, UsageError
from paceline.gradient_sync.local_sgd.averaging import LocalSteps
from paceline.gradient_sync.local_sgd.schedule import LocalPlan, LocalTerms
from paceline.gradient_sync.options import SyncPrecision
from tests.support.ranks import run_ranks
from tests.support.tiers import slow

pytestmark = pytest.mark.ranks
WORLDS = [1, 2, 3]
STEPS = 11
PRECISIONS: tuple[SyncPrecision, ...] = ("fp32", "bf16", "int8")


def terms(
    every: int = 3,
    delay: int = 0,
    parts: int = 1,
    precision: SyncPrecision = "fp32",
    outer: tuple[float, float] = (1.0, 0.0),
) -> LocalTerms:
    plan = LocalPlan(every=every, delay=delay, parts=parts)
    return LocalTerms(plan=plan, precision=precision, outer_lr=outer[0], outer_momentum=outer[1])


def net() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(), nn.Tanh(), nn.Linear(12, 2))
    return model.to(memory_format=torch.channels_last)


def pull(model: nn.Module, rank: int, step: int) -> None:
    """Take a step of plain gradient descent on this worker's own data."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(5, 1, 4, 4, generator=generator)
    loss = model(inputs).square().sum()
    every = list(model.parameters())
    for p, g in zip(every, torch.autograd.grad(loss, every), strict=True):
        p.data.sub_(g, alpha=0.01)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def named(model: nn.Module) -> Callable[[], dict[str, nn.Parameter]]:
    return lambda: dict(model.named_parameters())


def train(group: Group, how: LocalTerms, steps: int = STEPS) -> tuple[list[Tensor], int]:
    """Train one round, and end it; gives the weights after every step and at the end."""
    model = net()
    local = LocalSteps(how, group, named(model))
    local.start()
    found = []
    for step in range(1, steps + 1):
        pull(model, group.rank, step)
        local.after(step)
        found.append(weights(model))
    local.agree()
    local.release()
    return [*found, weights(model)], local.sent_bytes


class Reference:
    """The algorithm in one process, for a model that isn't cut: with fp64, and whole rows."""

    def __init__(self, how: LocalTerms, workers: int) -> None:
        self.how = how
        self.models = [net() for _ in range(workers)]
        self.anchor = weights(self.models[0]).double()
        self.velocity = torch.zeros_like(self.anchor)
        self.sent: list[Tensor] = []
        self.due = 0

    def rows(self) -> list[Tensor]:
        return [weights(model).double() for model in self.models]

    def outer(self, rows: list[Tensor]) -> None:
        """Step as torch.optim.SGD(nesterov=True) does, with the gradient A - mean."""
        gradient = self.anchor - torch.stack(rows).mean(0)
        self.velocity = self.how.outer_momentum * self.velocity + gradient
        step = gradient + self.how.outer_momentum * self.velocity
        self.anchor = self.anchor - self.how.outer_lr * step

    def arrive(self) -> None:
        self.outer(self.sent)
        for model, now, then in zip(self.models, self.rows(), self.sent, strict=True):
            put(model, now + self.anchor - then)
        self.sent = []

    def step(self, step: int) -> None:
        for rank, model in enumerate(self.models):
            pull(model, rank, step)
        if self.sent and self.due == step:
            self.arrive()
        if step % self.how.plan.every == 0:
            self.sent, self.due = self.rows(), step + self.how.plan.delay
            if self.how.plan.delay == 0:
                self.arrive()

    def end(self, steps: int) -> None:
        if self.sent:
            self.arrive()
        if self.how.plan.delay or steps % self.how.plan.every:  # else all are alike
            self.anchor = torch.stack(self.rows()).mean(0)
        for model in self.models:
            put(model, self.anchor)


def expected(how: LocalTerms, workers: int) -> list[list[Tensor]]:
    reference, found = Reference(how, workers), []
    for step in range(1, STEPS + 1):
        reference.step(step)
        found.append([row.float() for row in reference.rows()])
    reference.end(STEPS)
    return [*found, [row.float() for row in reference.rows()]]


def put(model: nn.Module, flat: Tensor) -> None:
    for p, part in zip(
        model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True
    ):
        p.data.copy_(part.view(p.shape))


RHYTHMS = [(1, 0), (3, 0), (3, 2), (4, 1), (STEPS, 0)]
OUTER = [(1.0, 0.0), (0.7, 0.9), (0.5, 0.0)]


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.core_cases(1)
def test_is_the_algorithm(world_size: int) -> None:
    every = [terms(*rhythm, outer=outer) for rhythm in RHYTHMS for outer in OUTER]
    found = run_ranks(world_size, lambda group: [train(group, how)[0] for how in every])
    for number, how in enumerate(every):
        wanted = expected(how, world_size)
        for rank, trained in enumerate(found):
            for step, (got, right) in enumerate(zip(trained[number], wanted, strict=True)):
                said = f"{how} rank {rank} step {step + 1}"
                torch.testing.assert_close(got, right[rank], rtol=1e-4, atol=2e-6, msg=said)
            assert torch.equal(trained[number][-1], found[0][number][-1])


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("parts", [2, 5, 100])
@pytest.mark.core_cases(4)
def test_parts_without_delay_average_all_weights_each_in_its_turn(
    parts: int, world_size: int
) -> None:
    """Over the steps of one period every weight becomes the mean of all workers' once."""

    def body(group: Group) -> tuple[Tensor, Tensor]:
        model = net()
        with torch.no_grad():
            start = weights(model)
            local = LocalSteps(terms(every=4, parts=parts), group, named(model))
            local.start()
            for p in model.parameters():
                p.add_(group.rank + 1)
            for step in range(1, 5):
                local.after(step)
            local.release()
        return start, weights(model)

    for start, found in run_ranks(world_size, body):
        torch.testing.assert_close(found, start + (world_size + 1) / 2)


@pytest.mark.slow
def test_the_same_bits_every_time_and_on_every_worker_at_the_end() -> None:
    every = [
        terms(every=3, delay=delay, parts=parts, precision=precision, outer=(0.7, 0.9))
        for delay, parts in ((0, 1), (2, 1), (2, 3))
        for precision in PRECISIONS
    ]

    def body(group: Group) -> list[list[Tensor]]:
        return [train(group, how)[0] for how in every]

    first, second = run_ranks(3, body), run_ranks(3, body)
    for mine, again, others in zip(first, second, [*first[1:], first[0]], strict=True):
        for states, same, other in zip(mine, again, others, strict=True):
            assert all(map(torch.equal, states, same))
            assert torch.equal(states[-1], other[-1])
            assert not torch.equal(states[-2], other[-2])  # before the end they differ


@pytest.mark.parametrize("world_size", [1, 2, slow(3)])
@pytest.mark.parametrize(("precision", "near"), [("bf16", 2e-3), ("int8", 4e-3)])
@pytest.mark.core_cases(3)
def test_rounding_loses_nothing_in_the_long_run(
    precision: SyncPrecision, near: float, world_size: int
) -> None:
    exact = run_ranks(world_size, train, terms(every=2, delay=1), 40)
    found = run_ranks(world_size, train, terms(every=2, delay=1, precision=precision), 40)
    for (states, _), (right, _) in zip(found, exact, strict=True):
        assert (states[-1] - right[-1]).abs().max() < near


@pytest.mark.parametrize("world_size", [1, 2, slow(3)])
@pytest.mark.core_cases(1)
def test_a_change_too_small_for_int8_arrives_all_the_same(world_size: int) -> None:
    """One weight moves by a thousandth of its neighbours': below a step of the block's 127.

    The workers' steps differ, so that their mean is on none of the grids: both roundings count.
    """

    def body(group: Group) -> tuple[Tensor, Tensor]:
        model = nn.Linear(8, 1, bias=False)
        with torch.no_grad():
            model.weight.zero_()
            local = LocalSteps(terms(every=1, precision="int8"), group, named(model))
            local.start()
            seen = []
            for step in range(1, 201):
                model.weight += torch.tensor([1.0 + group.rank, 0.001, 0, 0, 0, 0, 0, 0])
                local.after(step)
                seen.append(model.weight[0, 1].clone())
            local.agree()
            local.release()
        return torch.stack(seen), model.weight[0].detach()

    for seen, end in run_ranks(world_size, body):
        large = 200 * (world_size + 1) / 2
        torch.testing.assert_close(end[:2], torch.tensor([large, 0.2]), rtol=1e-3, atol=1e-4)
        assert (seen - 0.001 * torch.arange(1, 201)).abs().max() < 0.05


@pytest.mark.parametrize(
    ("precision", "share"), [("fp32", 1.0), ("bf16", 0.5), ("int8", 0.25 * (1 + 4 / 256))]
)
@pytest.mark.core_cases(2)
def test_bytes_that_are_sent_are_counted(precision: SyncPrecision, share: float) -> None:
    def body(group: Group) -> tuple[int, int]:
        model = nn.Linear(256 * 12, 1, bias=False)
        local = LocalSteps(terms(every=2, precision=precision), group, named(model))
        local.start()
        for step in range(1, 5):
            local.after(step)
        local.release()
        return local.sent_bytes, model.weight.nbytes

    for workers in (1, 2, 3):
        for sent, size in run_ranks(workers, body):
            assert sent == int(2 * 2 * (workers - 1) / workers * size * share)


@pytest.mark.parametrize("delay", [0, 2])
def test_the_average_is_lent_and_each_gets_its_own_back(delay: int) -> None:
    def body(group: Group) -> tuple[Tensor, Tensor, Tensor]:
        model = net()
        local = LocalSteps(terms(every=3, delay=delay), group, named(model))
        with local.averaged_weights():  # nothing to lend yet
            pass
        local.start()
        for step in range(1, 5):
            pull(model, group.rank, step)
            local.after(step)
        before = weights(model)
        with local.averaged_weights():
            averaged_weights = weights(model)
        after = weights(model)
        local.agree()
        local.release()
        return before, averaged_weights, after

    found = run_ranks(3, body)
    mean = torch.stack([before for before, _, _ in found]).mean(0)
    for before, averaged_weights, after in found:
        torch.testing.assert_close(averaged_weights, mean)
        assert torch.equal(averaged_weights, found[0][1])
        assert torch.equal(before, after)
        assert not torch.equal(before, averaged_weights)


def stopped(group: Group, how: LocalTerms, stop: int) -> tuple[Tensor, Tensor, bool]:
    """Train at once, and in two goes with another model: the weights, and whether a part was
    under way."""
    at_once, first, second = net(), net(), net()
    whole, begun, resumed = (
        LocalSteps(how, group, named(model)) for model in (at_once, first, second)
    )
    whole.start()
    begun.start()
    for step in range(1, STEPS + 1):
        pull(at_once, group.rank, step)
        whole.after(step)
        model, local = (first, begun) if step <= stop else (second, resumed)
        pull(model, group.rank, step)
        local.after(step)
        if step == stop:
            saved = begun.state()
            assert resumed.fits(saved.values)
            resumed.restore(saved)
    for local in (whole, resumed):
        local.agree()
    for local in (whole, begun, resumed):
        local.release()
    return weights(at_once), weights(second), bool(saved.values["underway"])


@pytest.mark.slow
def test_another_process_goes_on_where_one_stood() -> None:
    """In the midst of a round, with a part under way and without."""
    every = [
        (terms(every=4, delay=3, parts=parts, precision=precision, outer=outer), stop)
        for precision, outer in zip(PRECISIONS, OUTER, strict=True)
        for parts in (1, 3)
        for stop in (2, 5, 7)
    ]
    found = run_ranks(2, lambda group: [stopped(group, how, stop) for how, stop in every])
    for of_rank in found:
        assert all(torch.equal(right, resumed) for right, resumed, _ in of_rank)
        assert {underway for _, _, underway in of_rank} == {True, False}


def test_a_saved_round_is_gone_on_with_on_the_same_terms_alone() -> None:
    def body(group: Group) -> list[bool]:
        local = LocalSteps(terms(every=4, delay=1, parts=2), group, named(net()))
        local.start()
        local.moved()
        saved = json.loads(json.dumps(local.state().values))
        local.release()
        others = [
            terms(every=4, delay=1, parts=2),
            terms(every=4, delay=1, parts=2, outer=OUTER[1]),
        ]
        others += [terms(every=5, delay=1, parts=2), terms(every=4, delay=2, parts=2)]
        others += [terms(every=4, delay=1, parts=1), terms(4, 1, 2, precision="bf16")]
        fits = []
        for other in others:
            local = LocalSteps(other, group, named(net()))
            fits.append(local.fits(saved))
            local.release()
        return [*fits, local.fits({})]

    (found,) = run_ranks(1, body)
    assert found == [True, True, False, False, False, False, False]


@pytest.mark.parametrize("delay", [0, 1])
def test_a_worker_that_goes_is_an_error_of_the_others(delay: int) -> None:
    def body(group: Group) -> str:
        model = net()
        local = LocalSteps(terms(every=2, delay=delay), group, named(model))
        local.start()
        for step in range(1, 100):
            if group.rank == 1 and step == 5:
                local.release()  # leaves the group without a word to the others
                return "gone"
            try:
                local.after(step)
            except RuntimeError as error:
                local.release()
                return str(error)
        return "nothing noticed"

    first, second = run_ranks(2, body, limit_s=30)
    assert second == "gone"
    assert first not in ("", "gone", "nothing noticed")


def test_what_is_thawed_is_taken_in_with_the_next_round_or_refused_within_one() -> None:
    def body(group: Group) -> tuple[str, Tensor, Tensor]:
        model = net()
        first, last = model[0], model[3]
        assert isinstance(first, nn.Conv2d)
        assert isinstance(last, nn.Linear)
        last.requires_grad_(False)
        local = LocalSteps(terms(every=3, outer=(0.7, 0.9)), group, named(model))
        local.start()
        local.after(1)
        last.requires_grad_(True)
        with pytest.raises(JobError) as caught:
            local.agree()
        last.requires_grad_(False)
        local.agree()
        last.requires_grad_(True)
        local.start()
        with torch.no_grad():
            last.weight += group.rank
        local.after(1)
        local.agree()
        local.release()
        return str(caught.value), last.weight.detach(), first.weight.detach()

    found = run_ranks(2, body)
    for said, last, first in found:
        assert "3.weight was thawed in the midst of a pass" in said
        assert torch.equal(last, found[0][1])
        assert torch.equal(first, found[0][2])


def test_few_operations_average_where_they_begin() -> None:
    """As with MPI: no groups of one's own, no all-to-all."""

    def body(group: Group) -> Tensor:
        group.has_few_operations = True
        with pytest.raises(UsageError, match="--sync-precision int8 needs all-to-all"):
            LocalSteps(terms(precision="int8"), group, dict)
        return train(group, terms(every=3, delay=2))[0][-1]

    found = run_ranks(2, body)
    usual = run_ranks(2, train, terms(every=3, delay=2))
    assert all(torch.equal(got, right[0][-1]) for got, right in zip(found, usual, strict=True))
