"""Local steps of models whose parameters are frozen and thawed between two rounds."""

import pytest
import torch
from torch import Tensor, nn

from paceline.distributed.group import Group
from paceline.gradient_sync.local_sgd.averaging import LocalState, LocalSteps
from tests.gradient_sync.local_sgd.test_averaging import named, net, pull, terms
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks


def test_what_is_frozen_between_two_rounds_stays_and_forgets_its_velocity() -> None:
    def body(group: Group) -> tuple[Tensor, Tensor, set[str]]:
        model = net()
        last = model[3]
        assert isinstance(last, nn.Linear)
        local = LocalSteps(terms(every=1, outer=(0.7, 0.9)), group, named(model))
        for step in range(1, 4):
            local.start()
            if step == 3:
                before = last.weight.detach().clone()
            else:
                pull(model, group.rank, step)
            local.after(1)
            local.agree()
            last.requires_grad_(step < 2)
        kept = set(local.state().shared)
        local.release()
        return before, last.weight.detach(), kept

    for before, after, kept in run_ranks(2, body):
        assert torch.equal(before, after)
        assert kept == {"velocity/0.weight", "velocity/0.bias"}


def test_velocity_waits_for_a_parameter_that_is_thawed_after_the_start() -> None:
    """As a script does whose epoch begins with it."""

    def body(group: Group) -> tuple[LocalState, LocalState]:
        model = net()
        how = terms(every=1, outer=(0.7, 0.9))
        first, second = (LocalSteps(how, group, named(model)) for _ in range(2))
        first.start()
        pull(model, group.rank, 1)
        first.after(1)
        first.agree()
        model[3].requires_grad_(False)
        second.restore(first.state())
        model[3].requires_grad_(True)
        second.start()
        found = first.state(), second.state()
        first.release()
        second.release()
        return found

    for right, found in run_ranks(1, body):
        assert found.shared.keys() == right.shared.keys()
        assert all(torch.equal(found.shared[name], right.shared[name]) for name in right.shared)
        assert any(t.any() for name, t in found.shared.items() if "3.weight" in name)
