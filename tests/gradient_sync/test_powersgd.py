"""PowerSGD equals PyTorch's own where that works, loses nothing over time, and never waits for
itself."""

from collections.abc import Callable
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # not declared there
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from paceline.distributed.group import Group
from paceline.gradient_sync.powersgd import PowerSGD
from paceline.gradient_sync.replica import Replica
from tests.support.branches import assert_close, bits, gradients
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks
SHAPES = {"conv": (16, 4, 3, 3), "wide": (24, 40), "bias": (24,), "small": (2, 3)}
"""Two that are worth it with up to two columns at least, and two that aren't."""


_KEPT: list[object] = []


def gradients_of(rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def averaged(group: Group, rank: int, steps: int = 4) -> list[dict[str, Tensor]]:
    averager, found = PowerSGD(group.world_size, rank), []
    for step in range(steps):
        own = gradients_of(group.rank, step)
        averager.average_(own)
        found.append(own)
    return found


class FlatBucket:
    """Stands for the one bucket of a model."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._flat = torch.cat([t.flatten() for t in tensors.values()])
        parts = self._flat.split([t.numel() for t in tensors.values()])
        self._views = [p.view(t.shape) for p, t in zip(parts, tensors.values(), strict=True)]

    def buffer(self) -> Tensor:
        return self._flat

    def gradients(self) -> list[Tensor]:
        return self._views

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def by_torch(group: Group, rank: int, steps: int = 4) -> list[dict[str, Tensor]]:
    """PyTorch's own hook, one bucket at a time, beginning with the same bases."""
    # Its callbacks may be the last to let go of the group, which then ends the process.
    _KEPT.append(dist.group.WORLD)
    state = PowerSGDState(None, rank, start_powerSGD_iter=2, use_error_feedback=True)
    state.iter = 2
    begun = PowerSGD(group.world_size, rank)
    begun.average_(gradients_of(group.rank, 0))  # tells which are worth it
    fresh_one = PowerSGD(group.world_size, rank)
    like = gradients_of(group.rank, 0)
    bases = [fresh_one.begin(name, like[name]).basis for name in like if name in begun.low_rank]
    state.q_memory_dict[0] = torch.cat([b.flatten() for b in bases])
    rows = sum(like[name].shape[0] * rank for name in begun.low_rank)
    state.p_memory_dict[0] = torch.zeros(rows)
    found = []
    for step in range(steps):
        own = gradients_of(group.rank, step)
        bucket = FlatBucket(own)
        powerSGD_hook(state, cast(GradBucket, bucket)).wait()
        found.append(dict(zip(own, bucket.gradients(), strict=True)))
    return found


@pytest.mark.parametrize(("world_size", "rank"), [(2, 1), (3, 2), (2, 4)])
@pytest.mark.core_cases(2)
def test_it_equals_pytorchs_own(world_size: int, rank: int) -> None:
    expected = run_ranks(world_size, by_torch, rank)[0]
    first, *others = run_ranks(world_size, averaged, rank)
    for got, wanted in zip(first, expected, strict=True):
        assert_close(dict(got), dict(wanted), tolerance=1e-4)
    for other in others:
        assert [bits(dict(step)) for step in other] == [bits(dict(step)) for step in first]


def test_what_it_leaves_out_comes_later_and_is_never_lost() -> None:
    """Of all gradients so far, what isn't in the averages is in the errors."""

    def body(group: Group) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        averager = PowerSGD(group.world_size, 1)
        given = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        taken = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        for step in range(5):
            own = gradients_of(group.rank, step)
            for name, gradient in own.items():
                given[name] += gradient
            averager.average_(own)
            for name, gradient in own.items():
                taken[name] += gradient
        lacks = {
            n: group.sum_(t.error.clone()) / group.world_size for n, t in averager.low_rank.items()
        }
        assert lacks.keys() == {"conv", "wide"}
        assert all(bool(lack.norm() > 1) for lack in lacks.values())
        for name, lack in lacks.items():
            taken[name] += lack.view(taken[name].shape)
        return {n: group.sum_(g) / group.world_size for n, g in given.items()}, taken

    for given, taken in run_ranks(3, body):
        assert_close(dict(taken), dict(given), tolerance=1e-5)


@pytest.mark.parametrize("rank", [2, 4])
def test_one_step_by_hand(rank: int) -> None:
    (expected,) = run_ranks(1, by_hand, rank)
    for found in run_ranks(2, averaged, rank, 1):
        assert_close(dict(found[0]), dict(expected), tolerance=1e-5)


def by_hand(group: Group, rank: int) -> dict[str, Tensor]:
    """All workers' gradients in one place, with numbers of double length."""
    every = [gradients_of(rank, 0) for rank in range(2)]
    mean = {name: torch.stack([g[name] for g in every]).double().mean(0) for name in SHAPES}
    begun = PowerSGD(2, rank)
    for name in ("conv", "wide"):
        matrix = mean[name].reshape(mean[name].shape[0], -1)  # projections are linear
        basis = begun.begin(name, every[0][name]).basis.double()
        left = torch.linalg.qr(matrix @ basis)[0]
        mean[name] = (left @ (left.T @ matrix)).view(mean[name].shape)
    return {name: value.float() for name, value in mean.items()}


@pytest.mark.parametrize("name", ["wide", "bias"])
def test_a_gradient_that_isnt_finite_shows_everywhere_and_is_forgotten(name: str) -> None:
    def body(group: Group) -> None:
        averager = PowerSGD(group.world_size, 2)
        averager.average_(gradients_of(group.rank, 0))
        kept = {n: (t.error.clone(), t.basis.clone()) for n, t in averager.low_rank.items()}
        own = gradients_of(group.rank, 1)
        if group.rank == 1:
            own[name][3] = torch.inf
        averager.average_(own)
        assert not own["wide"].isfinite().any()  # a loss scaler leaves the step out
        for key, (error, basis) in kept.items():
            assert torch.equal(averager.low_rank[key].error, error)
            assert torch.equal(averager.low_rank[key].basis, basis)
        own = gradients_of(group.rank, 2)
        averager.average_(own)
        assert all(bool(g.isfinite().all()) for g in own.values())

    run_ranks(2, body)


def test_gradients_of_zero_stay_zero_and_what_comes_after_is_seen() -> None:
    def body(group: Group) -> None:
        averager = PowerSGD(group.world_size, 2)
        averager.average_({"wide": torch.zeros(24, 40)})
        one = torch.outer(torch.arange(24.0), torch.ones(40))  # of rank 1: nothing is left out
        for _ in range(2):
            own = {"wide": one.clone()}
            averager.average_(own)
        torch.testing.assert_close(own["wide"] + averager.low_rank["wide"].error, one)
        assert float(averager.low_rank["wide"].error.norm()) < 1e-3

    run_ranks(2, body)


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_errors_follow_the_loss_scale(kind: Callable[[float], float | Tensor]) -> None:
    def body(group: Group) -> list[dict[str, Tensor]]:
        scales, found = iter([1.0, 4.0, 2.0, 2.0]), []
        scale = 1.0
        told = kind(scale)  # a tensor is changed in place, as a loss scaler does
        averager = PowerSGD(group.world_size, 1, lambda: told)
        for step in range(4):
            scale = next(scales)
            told = told.fill_(scale) if isinstance(told, Tensor) else scale
            own = {
                name: gradient * scale for name, gradient in gradients_of(group.rank, step).items()
            }
            averager.average_(own)
            found.append({name: gradient / scale for name, gradient in own.items()})
        return found

    plain = run_ranks(2, averaged, 1)
    for found, expected in zip(run_ranks(2, body), plain, strict=True):
        for got, wanted in zip(found, expected, strict=True):
            assert_close(dict(got), dict(wanted), tolerance=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_in_other_memory_orders_and_types_are_replaced_where_they_are(
    dtype: torch.dtype,
) -> None:
    def body(group: Group) -> list[Tensor]:
        averager, found = PowerSGD(group.world_size, 1), []
        for step in range(3):
            plain = gradients_of(group.rank, step)["conv"].to(dtype)
            given = plain.to(memory_format=torch.channels_last)
            averager.average_({"conv": given})
            assert given.is_contiguous(memory_format=torch.channels_last)
            found.append(given.float())
        return found

    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    for found, expected in zip(run_ranks(2, body), run_ranks(2, averaged, 1), strict=True):
        for got, wanted in zip(found, expected, strict=False):
            assert_close({"conv": got}, {"conv": wanted["conv"]}, tolerance=tolerance)


def test_one_worker_gives_back_what_several_have_left_out() -> None:
    averager = PowerSGD(1, 2)
    averager.low_rank = PowerSGD(2, 2).low_rank
    two = PowerSGD(2, 2)
    two.begin("wide", torch.zeros(24, 40)).error.fill_(3.0)
    averager.low_rank = two.low_rank
    own = {"wide": torch.ones(24, 40)}
    averager.average_(own)
    averager.average_(own)
    assert torch.equal(own["wide"], torch.full((24, 40), 4.0))


def test_bytes_on_the_wire() -> None:
    tensors = [torch.zeros(shape) for shape in SHAPES.values()]
    # (16 + 36) * 2 and (24 + 40) * 2 numbers instead of 576 and 960; 24 and 6 as they are.
    assert PowerSGD(2, 2).wire_bytes(tensors) == 4 * (104 + 128 + 24 + 6)
    assert PowerSGD(1, 2).wire_bytes(tensors) == 0
    # With 8 columns nothing is worth it.
    assert PowerSGD(2, 16).wire_bytes(tensors) == 4 * (576 + 960 + 24 + 6)


# As a replica's own


@pytest.mark.slow
def test_models_types_and_sizes_that_would_be_many_buckets_dont_wait_for_each_other() -> None:
    """PyTorch's own hook never ends here: two buckets wait for each other on Gloo's threads."""

    def body(group: Group) -> list[bytes | None]:
        torch.manual_seed(0)
        first = nn.Sequential(nn.Linear(6, 400), nn.Linear(400, 700))  # more than DDP's first MiB
        second = nn.Sequential(nn.Linear(6, 50), nn.Linear(50, 60).double())
        replicas = [Replica(first, group), Replica(second, group)]
        found: list[bytes | None] = []
        for step in range(4):
            if step == 1:  # the end of a warm-up
                for replica in replicas:
                    replica.defer_to(PowerSGD(group.world_size, 2))
            inputs = torch.randn(3, 6, generator=torch.Generator().manual_seed(group.rank + step))
            hidden = second[0](inputs).double()
            (first(inputs).square().mean() + second[1](hidden).square().mean()).backward()
            for replica in replicas:
                replica.finish_backward()
            for model in (first, second):
                found += bits(gradients(model)).values()
                model.zero_grad()
        return found

    mine, theirs = run_ranks(2, body, limit_s=60)
    assert mine == theirs


def test_the_first_basis_is_settled_by_the_parameters_name_in_every_process() -> None:
    """Workers on several hosts share no seed but this; `hash` differs between processes.

    0xCBF43926 is the published check value of CRC-32: that of these nine digits.
    """
    thin = PowerSGD(2, 3).begin("123456789", torch.zeros(20, 30))
    generator = torch.Generator().manual_seed(0xCBF43926)
    assert torch.equal(thin.basis, torch.randn(30, 3, generator=generator))
    assert torch.equal(thin.error, torch.zeros(20, 30))


class Branching(nn.Module):
    """Two layers, of which one worker may leave out the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, inputs: Tensor, *, deep: bool) -> Tensor:
        hidden: Tensor = self.first(inputs)
        return (self.second(hidden) if deep else hidden).sum()


def test_a_parameter_without_a_gradient_on_one_worker_counts_as_zero_there() -> None:
    def body(group: Group) -> dict[str, Tensor | None]:
        torch.manual_seed(0)
        model = Branching()
        replica = Replica(model, group)
        replica.defer_to(PowerSGD(group.world_size, 1))
        model(torch.ones(2, 3), deep=group.rank == 0).backward()
        replica.finish_backward()
        return {name: p.grad for name, p in model.named_parameters()}

    torch.manual_seed(0)
    model = Branching()
    (model(torch.ones(2, 3), deep=True) / 2 + model(torch.ones(2, 3), deep=False) / 2).backward()
    for found in run_ranks(2, body):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad)
