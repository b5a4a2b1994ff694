"""Random numbers: whose they are, and dropout that draws but changes nothing."""

import random
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.verify.observing.rng_tracking import drawn_from, rng_states, watch_dropout
from paceline.verify.patching import Patches


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
    for _ in range(2):  # the second of a pair of normal numbers as well
        before = rng_states()
        np.random.standard_normal()
        assert drawn_from(before, rng_states()).startswith("numpy:")


def test_dropout_draws_and_changes_nothing() -> None:
    original, given = F.dropout, torch.ones(100, requires_grad=True)
    seen: list[int] = []
    watch = partial(
        watch_dropout, before=lambda t: seen.append(len(t)), after=lambda: seen.append(-1)
    )
    torch.manual_seed(1)
    dropped = F.dropout(given, 0.5)
    after = torch.rand(1)
    torch.manual_seed(1)
    with Patches() as patches:
        watch(patches, keep=lambda: False)
        assert torch.equal(torch.nn.Dropout(0.5)(given), given)
        assert torch.equal(torch.nn.Dropout(0.5, inplace=True)(given * 2), given * 2)
    torch.manual_seed(1)
    with Patches() as patches:
        watch(patches, keep=lambda: True)
        assert torch.equal(F.dropout(given, 0.5), dropped)
        assert torch.equal(torch.rand(1), after)
        assert torch.equal(F.dropout(given, 0.5, training=False), given)
    assert seen == [100, -1] * 3
    assert F.dropout is original


def attention(given: Tensor, dropout: float) -> Tensor:
    return F.scaled_dot_product_attention(given, given, given, dropout_p=dropout)


def recurrent(given: Tensor, dropout: float) -> Tensor:
    torch.manual_seed(0)
    output: Tensor = nn.LSTM(4, 4, num_layers=2, dropout=dropout, batch_first=True)(given)[0]
    return output


def packed(given: Tensor, dropout: float) -> Tensor:
    torch.manual_seed(0)
    layers = nn.GRU(4, 4, num_layers=2, dropout=dropout, batch_first=True)
    sequence = nn.utils.rnn.pack_padded_sequence(given, torch.tensor([5, 3]), batch_first=True)
    output: Tensor = layers(sequence)[0].data
    return output


@pytest.mark.parametrize("layer", [attention, recurrent, packed])
def test_dropout_within_layers_changes_nothing_either(
    layer: Callable[[Tensor, float], Tensor],
) -> None:
    given = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(2))
    seen: list[str] = []
    torch.manual_seed(1)
    dropped = layer(given, 0.5)
    after = torch.rand(1)
    for keeps, expected in ((False, layer(given, 0.0)), (True, dropped)):
        torch.manual_seed(1)
        with Patches() as patches:
            watch_dropout(
                patches,
                lambda _: seen.append("before"),
                lambda: seen.append("after"),
                keep=partial(bool, keeps),
            )
            assert torch.equal(layer(given, 0.5), expected)
        assert torch.equal(torch.rand(1), after)
    assert not torch.equal(dropped, layer(given, 0.0))
    assert seen == ["before", "after"] * 2
