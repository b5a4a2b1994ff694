"""The random numbers of a training: who draws the same ones, and dropout that changes nothing."""

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import _VF, Tensor
from torch.nn import functional as F

from paceline.verify.patching import Patches

_DROPOUTS = (
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
)


_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_AFTER_WEIGHTS = 3
"""Where these functions take how much they drop, after the list of weights: biases, layers, this;
then whether it is training."""


def rng_states() -> Mapping[str, str]:
    """Hash the state of each of this process's default generators."""
    legacy = np.random.get_state(legacy=False)
    # Its normal numbers are drawn in pairs, of which the second waits in the generator.
    place = (legacy["state"]["pos"], legacy["has_gauss"], legacy["gauss"])
    states = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "python": repr(random.getstate()).encode(),
        "numpy": repr(place).encode() + legacy["state"]["key"].tobytes(),
    }
    return {name: hashlib.sha256(state).hexdigest()[:16] for name, state in states.items()}


def drawn_from(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Name the generators that were drawn from, with the state they were in; empty for none."""
    return " ".join(f"{n}:{state}" for n, state in before.items() if after[n] != state)


@contextmanager
def dropout_watched(
    before: Callable[[Tensor], None], after: Callable[[], None], *, keep: Callable[[], bool]
) -> Iterator[None]:
    """Call hooks around every dropout that draws random numbers.

    Other numbers of workers draw other masks, and would all be different: so dropout draws as it
    would, and then gives its input back. Attention and recurrent layers drop out within: they are
    computed twice.

    Args:
        before: Is given the input of each dropout in training mode.
        after: Is called when it has drawn.
        keep: Tells whether to leave the result of dropout as it is.
    """
    watch = _DropoutWatch(before, after, keep)
    with Patches() as patches:
        for name in _DROPOUTS:
            patches.hook(F, name, watch.dropout)
        patches.hook(F, "scaled_dot_product_attention", watch.attention)
        for name in _RECURRENT:
            patches.hook(_VF, name, watch.recurrent)
        yield


@final
@dataclass(frozen=True)
class _DropoutWatch:
    """Replaces dropout: it draws its random numbers, but drops nothing."""

    before: Callable[[Tensor], None]
    after: Callable[[], None]
    keep: Callable[[], bool]

    def dropout(
        self,
        original: Callable[..., object],
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> object:
        """Replace one of `F`'s dropout functions."""
        if not training or p == 0:
            return original(input, p, training, inplace)
        self.before(input)
        if self.keep():
            result = original(input, p, training, inplace)
        else:
            # The numbers are drawn all the same, so that whatever draws after it gets what it
            # would have got.
            with torch.no_grad():
                original(input, p, training, False)
            result = input
        self.after()
        return result

    def attention(
        self,
        original: Callable[..., object],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        *arguments: object,
        **named: object,
    ) -> object:
        """Replace scaled_dot_product_attention, which drops out within."""

        def call(p: float) -> object:
            return original(query, key, value, attn_mask, p, *arguments, **named)

        return self._watched(call, query, dropout_p)

    def recurrent(self, original: Callable[..., object], *arguments: Any) -> object:
        """Replace a kernel of recurrent layers, which drops out between its layers."""
        # A packed sequence's batch sizes stand before the hidden state.
        weights = next(n for n, value in enumerate(arguments) if isinstance(value, list))
        place = weights + _AFTER_WEIGHTS

        def call(p: float) -> object:
            return original(*arguments[:place], p, *arguments[place + 1 :])

        given, p, is_training = arguments[0], arguments[place], arguments[place + 1]
        return self._watched(call, given, p if is_training else 0.0)

    def _watched(self, call: Callable[[float], object], given: Tensor, p: float) -> object:
        """Call an operation that drops out within; unless that is kept, once more with p = 0."""
        if p == 0:
            return call(p)
        self.before(given)
        if self.keep():
            result = call(p)
            self.after()
            return result
        with torch.no_grad():
            call(p)
        self.after()
        return call(0.0)
