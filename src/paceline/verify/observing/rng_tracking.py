"""The random numbers of a training: who draws the same ones, and dropout that changes nothing."""

import hashlib
import random
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import _VF, Tensor
from torch.nn import functional as F

from paceline.verify.patching import Patches

_DROPOUTS = tuple(name for name in vars(F) if re.fullmatch(r"(\w+_)?dropout[123]?d?", name))
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_AFTER_WEIGHTS = 3
"""Where these functions take how much they drop, after the list of weights: biases, layers, this;
then whether it is training."""


def rng_states() -> Mapping[str, str]:
    """Hash the state of each of this process's default generators."""
    _, keys, *place = np.random.get_state(legacy=True)
    states = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "python": repr(random.getstate()).encode(),
        "numpy": np.asarray(keys).tobytes()
        + repr(place).encode(),  # with the second of two normal numbers
    }
    return {name: hashlib.sha256(state).hexdigest()[:16] for name, state in states.items()}


def drawn_from(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Name the generators that were drawn from, with the state they were in; empty for none."""
    return " ".join(f"{n}:{state}" for n, state in before.items() if after[n] != state)


def watch_dropout(
    patches: Patches,
    before: Callable[[Tensor], object],
    after: Callable[[], object],
    *,
    keep: Callable[[], bool],
) -> None:
    """Call hooks around every dropout that draws random numbers, and have it change nothing.

    Other numbers of workers draw other masks, and would all be different: so dropout draws as it
    would, so that whatever draws after it gets what it would have got, and then drops nothing.

    Args:
        before: Is given the input of each dropout in training mode.
        after: Is called when it has drawn.
        keep: Returns whether to leave the result of dropout as it is.
    """

    def watched(split: Callable[..., _Split], /, *arguments: Any, **named: Any) -> object:
        given, p, run = split(*arguments, **named)
        if p == 0:
            return run(p)
        before(given)
        keeps = keep()
        with torch.set_grad_enabled(keeps and torch.is_grad_enabled()):
            result = run(p)
        after()
        return result if keeps else run(0.0)

    for name in _DROPOUTS:
        patches.hook(F, name, partial(watched, _split_dropout))
    patches.hook(F, "scaled_dot_product_attention", partial(watched, _split_attention))
    for name in _RECURRENT:
        patches.hook(_VF, name, partial(watched, _split_recurrent))


_Split = tuple[Tensor, float, Callable[[float], object]]
"""Of a call: its input, how much it drops, and how to repeat it with another share."""


def _split_dropout(
    original: Callable[..., object],
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> _Split:
    return input, p * training, lambda p: original(input, p, p > 0, inplace=False)


def _split_attention(
    original: Callable[..., object],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    *more: object,
    **named: object,
) -> _Split:
    return query, dropout_p, lambda p: original(query, key, value, attn_mask, p, *more, **named)


def _split_recurrent(original: Callable[..., object], *arguments: Any) -> _Split:
    """Split the call of a kernel of recurrent layers, which drops out between its layers."""
    # A packed sequence's batch sizes stand before the hidden state.
    weights = next(n for n, value in enumerate(arguments) if isinstance(value, list))
    place = weights + _AFTER_WEIGHTS
    p, is_training = arguments[place : place + 2]
    before, after = arguments[:place], arguments[place + 1 :]
    return arguments[0], p * is_training, lambda p: original(*before, p, *after)
