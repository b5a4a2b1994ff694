"""The random numbers of a training: who draws the same ones, and dropout that changes nothing."""

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps

import numpy as np
import torch
from torch import Tensor
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


def rng_states() -> Mapping[str, str]:
    """Hash the state of each of this process's default generators."""
    legacy = np.random.get_state(legacy=False)
    states = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "python": repr(random.getstate()).encode(),
        "numpy": repr(legacy["state"]).encode() + legacy["state"]["key"].tobytes(),
    }
    return {name: hashlib.sha256(state).hexdigest()[:16] for name, state in states.items()}


def drawn_from(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Name the generators that were drawn from, with the state they were in; empty for none."""
    return " ".join(f"{n}:{state}" for n, state in before.items() if after[n] != state)


@contextmanager
def dropout_watched(
    before: Callable[[Tensor], None], after: Callable[[], None], *, keep: Callable[[], bool]
) -> Iterator[None]:
    """Tell of every dropout that is about to draw.

    Other numbers of workers draw other masks, and would all be different: so dropout draws as it
    would, and then gives its input back.

    Args:
        before: Is given the input of each dropout in training mode.
        after: Is called when it has drawn.
        keep: Tells whether to leave the result of dropout as it is.
    """

    def around(original: Callable[..., object]) -> Callable[..., object]:
        @wraps(original)
        def dropout(
            input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
        ) -> object:
            # Draws nothing.
            if not training or p == 0:
                return original(input, p, training, inplace)
            before(input)
            if keep():
                result = original(input, p, training, inplace)
            else:
                # The numbers are drawn all the same, so that whatever draws after it gets what it
                # would have got.
                with torch.no_grad():
                    original(input, p, training, False)
                result = input
            after()
            return result

        return dropout

    with Patches() as patches:
        for name in _DROPOUTS:
            patches.wrap(F, name, around)
        yield
