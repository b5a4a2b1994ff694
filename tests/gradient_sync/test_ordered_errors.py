"""What can't be summed is an error on every worker, with the names: nobody waits for ever."""

import pytest
import torch
from torch import Tensor, nn

from paceline.distributed.group import Group
from paceline.errors import JobError, UsageError
from paceline.gradient_sync.ordered.reduce import OrderedSum
from tests.support.ranks import run_ranks
from tests.support.shards import assert_same_bits, expected_sums, fresh_net, gradients_of, run_step

FIX = "loss + 0 * parameter.sum()"


class Branch(nn.Module):
    """Uses its spare part when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.spare = nn.Linear(3, 4)

    def forward(self, inputs: Tensor, *, spare: bool) -> Tensor:
        scores: Tensor = self.body(inputs)
        return scores + self.spare(inputs) if spare else scores


def loss_of(model: nn.Module, shard: int, *, spare: bool) -> Tensor:
    value: Tensor = model(torch.full((1, 3), 1.0 + shard), spare=spare).square().sum()
    return value


def said_by(group: Group, shards: int, plan: list[list[bool]]) -> str:
    """Use the spare part by `plan[step][shard]`, and tell the error of the last step."""
    ordered, model = OrderedSum(group, shards, bucket_bytes=64), Branch()
    for uses in plan[:-1]:
        run_step(ordered, model, lambda m, s, u=uses: loss_of(m, s, spare=u[s]))  # type: ignore[misc]
    with pytest.raises(JobError) as error:
        run_step(ordered, model, lambda m, s: loss_of(m, s, spare=plan[-1][s]))
    return str(error.value)


@pytest.mark.ranks
@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("shard", [0, 1, 3])
@pytest.mark.core_cases(4)
def test_a_gradient_that_one_shard_lacks_is_named_on_every_rank(workers: int, shard: int) -> None:
    plan = [[True] * 4, [s != shard for s in range(4)]]
    rank = shard * workers // 4
    for said in run_ranks(workers, said_by, 4, plan):
        assert said.startswith(
            f"spare.weight, spare.bias got no gradient in shard {shard} on rank {rank}, but did "
            "before. "
        )
        assert said.endswith(FIX)


@pytest.mark.ranks
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_a_gradient_that_only_one_shard_has_is_named_on_every_rank(workers: int) -> None:
    plan = [[False] * 4, [False, False, True, False]]
    for said in run_ranks(workers, said_by, 4, plan):
        assert said.startswith(
            f"spare.weight, spare.bias got a gradient in shard 2 on rank {2 * workers // 4}, but "
            "none before. "
        )


@pytest.mark.ranks
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_shards_that_differ_in_the_first_step_are_named_on_every_rank(workers: int) -> None:
    rank = 2 * workers // 4
    there = "before" if workers == 1 else "in shard 0 on rank 0"
    for said in run_ranks(workers, said_by, 4, [[True, True, False, True]]):
        assert f"got no gradient in shard 2 on rank {rank}, but did {there}. " in said


@pytest.mark.ranks
@pytest.mark.parametrize("workers", [1, 2])
def test_the_step_after_an_error_is_right(workers: int) -> None:
    def body(group: Group) -> None:
        ordered, model = OrderedSum(group, 4), Branch()
        for lacking in (None, 3, None, 0, None):

            def loss(module: nn.Module, shard: int, lacking: int | None = lacking) -> Tensor:
                return loss_of(module, shard, spare=shard != lacking)

            if lacking is None:
                wanted = expected_sums(model, 4, loss)
                run_step(ordered, model, loss)
                assert_same_bits(gradients_of(dict(model.named_parameters())), wanted)
            else:
                with pytest.raises(JobError):
                    run_step(ordered, model, loss)
                assert all(p.grad is None for p in model.parameters())

    run_ranks(workers, body)


@pytest.mark.ranks
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("is_closed", [True, False])
@pytest.mark.core_cases(3)
def test_a_second_backward_pass_of_a_shard_is_refused(
    workers: int, step: int, is_closed: bool
) -> None:
    def body(group: Group) -> None:
        ordered, model = OrderedSum(group, 2), fresh_net()
        for _ in range(step):
            run_step(ordered, model)
        ordered.begin_step(dict(model.named_parameters()))
        ordered.open_shard(ordered.own_shards[0])
        loss = model(torch.ones(1, 3, 8, 8)).sum()
        loss.backward(retain_graph=True)
        if is_closed:
            ordered.close_shard()

        def again() -> None:
            loss.backward()
            ordered.close_shard()

        with pytest.raises(UsageError, match="one backward pass a shard: add the losses up"):
            again()

    run_ranks(workers, body)


@pytest.mark.ranks
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("steps", [0, 1])
def test_a_gradient_that_a_hook_drops_is_refused(workers: int, steps: int) -> None:
    def body(group: Group) -> None:
        ordered, model = OrderedSum(group, 2), fresh_net()
        for _ in range(steps):
            run_step(ordered, model)
        *_, first_to_come = model.parameters()
        first_to_come.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        with pytest.raises(UsageError, match=r"is gone within the backward pass"):
            run_step(ordered, model)

    run_ranks(workers, body)


@pytest.mark.ranks
def test_buckets_leave_during_the_backward_pass() -> None:
    def body(group: Group) -> list[int]:
        ordered, model, left = OrderedSum(group, 2), fresh_net(), []
        run_step(ordered, model)
        ordered.begin_step(dict(model.named_parameters()))
        value = model(torch.ones(1, 3, 8, 8)).sum()
        ordered.open_shard(ordered.own_shards[0])
        value.backward()
        left.append(ordered._left)
        ordered.close_shard()
        left.append(ordered._left)
        ordered.finish()
        ordered.release()
        return left

    for in_pass, in_all in run_ranks(2, body):
        assert in_pass == in_all > 0


@pytest.mark.ranks
@pytest.mark.parametrize("workers", [1, 2])
def test_sparse_gradients_are_refused(workers: int) -> None:
    def body(group: Group) -> None:
        model = nn.Embedding(4, 2, sparse=True)
        ordered = OrderedSum(group, 2)
        with pytest.raises(JobError, match="weight has a sparse gradient"):
            run_step(ordered, model, lambda m, s: m(torch.tensor([s])).sum())

    run_ranks(workers, body)
