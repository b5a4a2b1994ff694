"""Perturbs a training by as much as rounding does, to measure how far rounding alone takes it.

Weights are disturbed in their last bit, so that everything that is computed from them is rounded
anew; what is no more than rounding (the gradient of a bias before a BatchNorm, say, which Adam
makes as large as any other) then comes out otherwise. Gradients are disturbed by some bits more: by
what another order of their sum over samples would change.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from paceline.verify.tensor_sketch import local_part, sign_block

_SUMS = 8.0
"""Rounding errors that a gradient's element gathers, as a multiple of the last bit."""
_STRIDE = 997
_OF_AUTOCAST = 0.25
"""Part of autocast's last bit that is left in a sum over many products."""


def disturb_weights(parameters: Iterable[Tensor], step: int) -> None:
    """Move each weight by its last bit, up or down.

    Args:
        parameters: Changed.
    """
    with torch.no_grad():
        for parameter in map(local_part, parameters):
            if parameter.is_floating_point():
                up = _signs(parameter, step)
                parameter.add_(parameter * up * torch.finfo(parameter.dtype).eps)


def disturb_gradients(
    parameters: Iterable[Tensor], step: int, autocast: torch.dtype | None
) -> None:
    """Add noise to gradients: each element moves by the same size, up or down.

    An element that is exactly zero stays: it is a sum of zeros (of a unit that no sample activates,
    say), which come out alike in any order. Adam would turn the noise into a whole step.

    Args:
        parameters: Whose gradients are changed.
        autocast: The type that the forward pass was computed in, if it is another one.
    """
    for parameter in parameters:
        if parameter.grad is None or not parameter.grad.is_floating_point():
            continue
        gradient = local_part(parameter.grad)
        size = _SUMS * torch.finfo(gradient.dtype).eps
        if autocast is not None:
            size = max(size, _OF_AUTOCAST * torch.finfo(autocast).eps)
        scale = gradient.square().mean().sqrt() * size
        gradient.add_(_signs(gradient, step) * scale * (gradient != 0))


def _signs(like: Tensor, step: int) -> Tensor:
    """Give 1 and -1 in a tensor's shape: one pseudo-random block, again and again."""
    block = sign_block().roll(step * _STRIDE).to(like.device, like.dtype)
    return block.repeat(-(-like.numel() // len(block)))[: like.numel()].view(like.shape)
