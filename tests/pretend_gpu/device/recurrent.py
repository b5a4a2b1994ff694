"""Recurrent layers: the operators of cuDNN, which the CPU hasn't got, by those that it has."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

_LSTM = 2
_OF_MODE: dict[int, Callable[..., Any]] = {
    0: torch.rnn_relu,
    1: torch.rnn_tanh,
    _LSTM: torch.lstm,
    3: torch.gru,
}
"""By cuDNN's number, `cudnnRNNMode_t`."""


def forward(input: Tensor, **given: Any) -> tuple[Tensor | None, ...]:
    """Be `_cudnn_rnn`."""
    output, *states = _layers(input, **given)
    hy, cy = states if len(states) > 1 else (states[0], None)
    return output, hy, cy, None, None  # what it reserves and the flat weights are its own


def backward(
    input: Tensor,
    weight: list[Tensor],
    hx: Tensor,
    cx: Tensor | None,
    grad_output: Tensor | None,
    grad_hy: Tensor | None,
    grad_cy: Tensor | None,
    **given: Any,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, list[Tensor | None]]:
    """Be `_cudnn_rnn_backward`."""

    def computed() -> list[Tensor | None]:
        sources = [s if s is None else s.detach().requires_grad_() for s in (input, hx, cx)]
        weights = [w.detach().requires_grad_() for w in weight]
        made = _layers(sources[0], weight=weights, hx=sources[1], cx=sources[2], **given)
        grads = zip(made, (grad_output, grad_hy, grad_cy), strict=False)
        known = [(tensor, grad) for tensor, grad in grads if grad is not None]
        asked = [s for s in sources if s is not None] + weights
        outputs, of_outputs = zip(*known, strict=True)
        found = [*torch.autograd.grad(outputs, asked, of_outputs, allow_unused=True)]
        return [*found[:2], *([] if cx is not None else [None]), *found[2:]]

    with ThreadPoolExecutor(1) as apart:  # this thread is below autograd
        dx, dhx, dcx, *of_weights = apart.submit(computed).result()
    return dx, dhx, dcx, of_weights


def _layers(
    input: Tensor | None,
    weight: list[Tensor],
    weight_stride0: int,
    hx: Tensor | None,
    mode: int,
    num_layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_sizes: list[int],
    cx: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, ...]:
    assert not batch_sizes, "packed sequences aren't there"
    assert not (train and dropout), "dropout between recurrent layers isn't there"
    has_biases = weight_stride0 > len(("ih", "hh"))
    state = (hx, cx) if mode == _LSTM else hx
    how = (has_biases, num_layers, dropout, train, bidirectional, batch_first)
    made: tuple[Tensor, ...] = _OF_MODE[mode](input, state, weight, *how)
    return made
