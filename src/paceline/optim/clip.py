"""Clipping of the gradient by its global norm, without waiting for the device."""

from collections.abc import Iterable

from torch import Tensor
from torch.nn.utils import clip_grad_norm_


def clip_gradients(
    parameters: Iterable[Tensor], max_norm: float, foreach: bool | None = True
) -> Tensor:
    """Scale all gradients in place so that together they are at most `max_norm` long.

    Called by every worker on the combined gradient, after a loss scaler has unscaled it and before
    the optimizer's step; it communicates nothing, and equal gradients give equal results.

    Args:
        parameters: Parameters whose `grad` is clipped; those without one are passed over.
        max_norm: Largest allowed 2-norm.
        foreach: Use torch's batched operations; None lets torch choose by device.

    Returns:
        The norm before clipping as a tensor of shape () on the gradients' device: no host sync.
        It is NaN or infinite where a gradient is; that isn't an error here.
    """
    return clip_grad_norm_(parameters, max_norm, error_if_nonfinite=False, foreach=foreach)
