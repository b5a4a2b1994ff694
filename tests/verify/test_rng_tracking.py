"""Random numbers: whose they are, and dropout that draws but changes nothing."""

import random

import numpy as np
import torch
from torch.nn import functional as F

from paceline.verify.rng_tracking import drawn_from, dropout_watched, rng_states


def test_who_was_drawn_from() -> None:
    before = rng_states()
    assert drawn_from(before, rng_states()) == ""
    random.random()
    torch.rand(1)
    found = drawn_from(before, rng_states())
    assert found == f"torch:{before['torch']} python:{before['python']}"
    before = rng_states()
    np.random.rand()
    assert drawn_from(before, rng_states()).startswith("numpy:")


def test_dropout_draws_and_changes_nothing() -> None:
    original, given = F.dropout, torch.ones(100, requires_grad=True)
    seen: list[int] = []
    torch.manual_seed(1)
    dropped = F.dropout(given, 0.5)
    after = torch.rand(1)
    torch.manual_seed(1)
    with dropout_watched(
        lambda t: seen.append(len(t)), lambda: seen.append(-1), keep=lambda: False
    ):
        assert torch.equal(torch.nn.Dropout(0.5)(given), given)
        assert torch.equal(torch.nn.Dropout(0.5, inplace=True)(given * 2), given * 2)
    torch.manual_seed(1)
    with dropout_watched(lambda t: seen.append(len(t)), lambda: seen.append(-1), keep=lambda: True):
        assert torch.equal(F.dropout(given, 0.5), dropped)
        assert torch.equal(torch.rand(1), after)
        assert torch.equal(F.dropout(given, 0.5, training=False), given)
    assert seen == [100, -1] * 3
    assert F.dropout is original
