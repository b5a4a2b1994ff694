"""Several models, models that change, and what a model is besides its gradients."""

import copy
import io
import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.distributed.group import Group
from paceline.errors import JobError
from paceline.gradient_sync.replica import Replica
from tests.support.branches import (
    ROWS,
    Branches,
    assert_close,
    both,
    fresh,
    gradients,
    one_head,
    rows_of,
)
from tests.support.ranks import run_ranks
from tests.support.replicas import Gradients, assert_steps_close, replica_of

WORLDS = [1, 2, 3]


def gan_gradients(group: Group, freeze: bool, columns: int | None) -> list[Gradients]:
    """The usual order: the generator's forward pass stands before the discriminator's step."""
    torch.manual_seed(0)
    generator, judge = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Linear(3, 1)
    replicas = [replica_of(model, group, columns) for model in (generator, judge)]
    found = []
    for step in range(3):
        real, noise = rows_of(group, step), rows_of(group, step + 50)
        fake = generator(noise)
        (judge(fake.detach()).mean() - judge(real).mean()).backward()
        for replica in replicas:
            replica.finish_backward()
        found.append(gradients(judge))
        judge.zero_grad()
        if freeze:
            judge.requires_grad_(False)
        (-judge(fake).mean()).backward()
        for replica in replicas:
            replica.finish_backward()
        judge.requires_grad_(True)
        found.append(gradients(generator))
        for module in (generator, judge):
            module.zero_grad()
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(("columns", "worlds"), [(None, (2, 3)), (1000, (2,))])
@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.core_cases(2)
def test_two_models_in_turns(freeze: bool, columns: int | None, worlds: tuple[int, ...]) -> None:
    (expected,) = run_ranks(1, gan_gradients, freeze, columns)
    for world_size in worlds:
        assert_steps_close(run_ranks(world_size, gan_gradients, freeze, columns), expected)


@pytest.mark.ranks
@pytest.mark.parametrize("columns", [None, 1000])
def test_parameters_thawed_and_frozen_later_are_averaged_too(columns: int | None) -> None:
    def body(group: Group) -> list[Gradients]:
        model = fresh()
        model.body.requires_grad_(False)
        replica = replica_of(model, group, columns)
        found = []
        for step in range(6):
            if step == 2:
                model.body.requires_grad_(True)
            if step == 4:
                model.head.requires_grad_(False)
            model.zero_grad()
            both(model, rows_of(group, step), step).backward()
            replica.finish_backward()
            found.append(gradients(model))
        return found

    (expected,) = run_ranks(1, body)
    assert expected[0]["body.weight"] is None
    assert expected[2]["body.weight"] is not None
    assert expected[5]["head.weight"] is None
    assert_steps_close(run_ranks(2, body), expected)


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", WORLDS)
def test_the_module_stays_what_it_was(world_size: int) -> None:
    def body(group: Group) -> None:
        model = fresh()
        names = list(model.state_dict())
        replica = Replica(model, group, model.forward)
        for step in range(2):
            both(model, rows_of(group), step).backward()
            replica.finish_backward()
        assert isinstance(model, Branches)
        assert list(model.state_dict()) == names
        assert [n for n, _ in model.named_modules()] == ["", "body", "head", "spare"]
        replica.release()
        assert "forward" not in vars(model)
        both(model, rows_of(group), 0).backward()

    run_ranks(world_size, body)


@pytest.mark.ranks
def test_a_copy_works_alone() -> None:
    """An average of the weights, say; by copy.deepcopy or by saving the whole module."""

    def body(group: Group) -> None:
        model = fresh()
        replica = Replica(model, group)
        both(model, rows_of(group), 0).backward()
        replica.finish_backward()
        saved = io.BytesIO()
        torch.save(model, saved)
        loaded = torch.load(io.BytesIO(saved.getvalue()), weights_only=False)
        for other in (copy.deepcopy(model), loaded):
            assert isinstance(other, Branches)
            assert torch.equal(other(rows_of(group))["scores"], model(rows_of(group))["scores"])
            with torch.no_grad():
                other.head.weight.zero_()
            other.zero_grad()
            if group.rank == 0:  # nobody waits for the others
                one_head(other, rows_of(group), 0).backward()
        assert model.head.weight.detach().abs().sum() > 0

    run_ranks(2, body)


@pytest.mark.ranks
def test_models_that_differ_are_an_error_that_names_the_difference() -> None:
    def body(group: Group) -> str:
        model = nn.Sequential(nn.Linear(2, 2 + group.rank))
        with pytest.raises(JobError) as caught:
            Replica(model, group)
        return str(caught.value)

    for message in run_ranks(2, body):
        assert re.search(r"rank 0 on \S+ and rank 1 on \S+ differ", message)
        assert "0.weight (2, 2)" in message
        assert "0.weight (3, 2)" in message


@pytest.mark.ranks
def test_tied_and_frozen_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.out.weight = self.table.weight
            self.scale = nn.Parameter(torch.ones(1), requires_grad=False)

        def forward(self, tokens: Tensor) -> Tensor:
            scores: Tensor = self.out(self.table(tokens)) * self.scale
            return scores

    def body(group: Group) -> dict[str, Tensor | None]:
        torch.manual_seed(0)
        model = Tied()
        replica = Replica(model, group)
        tokens = torch.arange(ROWS).chunk(group.world_size)[group.rank] % 5
        for _ in range(2):
            model.zero_grad()
            F.cross_entropy(model(tokens), tokens).backward()
            assert replica.finish_backward() == ()
        return gradients(model)

    (expected,) = run_ranks(1, body)
    assert expected["scale"] is None
    for found in run_ranks(3, body):
        assert_close(found, expected)
