"""Optimizers made from options, and clipping of the gradients that they are given."""

from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.metadata import version
from inspect import signature

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from paceline.distributed.device import features
from paceline.errors import JobError, UsageError
from paceline.optim.options import OptimOptions, optimizer_arguments
from paceline.optim.table import FUSED, OPTIMIZERS, OptimizerEntry


def build_optimizer(
    options: OptimOptions,
    named_parameters: Iterable[tuple[str, Parameter]],
    lr: float,
    *,
    fused: bool = False,
) -> Optimizer:
    """Build an optimizer over all parameters that require a gradient, in one parameter group.

    The same calls on equal gradients give the same bits on every worker; nothing is communicated.
    novograd and lars write into the gradients during `step`: read or clip gradients before it.

    Args:
        named_parameters: As a module's `named_parameters()`; the group keeps the names.
        lr: Learning rate at factor 1, scaled already.
        fused: Take torch's kernel that updates all weights at once, see `takes_fused`.

    Raises:
        JobError: No parameter requires a gradient.
        UsageError: The installed library lacks an option that the optimizer needs.
    """
    trainable = [(name, p) for name, p in named_parameters if p.requires_grad]
    if not trainable:
        raise JobError(
            "the model has no parameter that requires a gradient, so there is nothing to train"
        )
    entry = OPTIMIZERS[options.optimizer]
    make = _load(entry)
    keywords = {**entry.fixed, **optimizer_arguments(options)}
    if fused:
        keywords |= FUSED
    _check_keywords(entry, make, keywords)
    optimizer = make(trainable, lr=lr, **keywords)
    for group in optimizer.param_groups:
        group.update(entry.group)
    return optimizer


def takes_fused(options: OptimOptions, device: torch.device, *, exact: bool) -> bool:
    """Choose whether all weights are updated by one kernel: by the options, or on GPUs. Pure.

    Args:
        options: Which optimizer, and whether the user wants it so.
        exact: The same bits are promised.
    """
    if options.fused is not None:
        return options.fused
    return OPTIMIZERS[options.optimizer].has_fused and features(device).has_fused and not exact


def _load(entry: OptimizerEntry) -> Callable[..., Optimizer]:
    kind = getattr(import_module(entry.module), entry.class_name)
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise TypeError(f"{entry.module}.{entry.class_name} isn't an optimizer class")
    return kind


def _check_keywords(
    entry: OptimizerEntry, make: Callable[..., Optimizer], keywords: Iterable[str]
) -> None:
    """Check names against the constructor: pytorch_optimizer swallows the ones it doesn't know."""
    known = signature(make).parameters
    missing = [name for name in keywords if name not in known]
    if missing:
        library = entry.module.partition(".")[0]
        raise UsageError(
            f"{entry.class_name} of the installed {library} {version(library)} has no "
            f"{', '.join(missing)}; install a newer {library}"
        )


def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale all gradients in place so that together they are at most `max_norm` long.

    Called by every worker on the combined gradient, after a loss scaler has unscaled it and before
    the optimizer's step; it communicates nothing, and equal gradients give equal results.

    Args:
        parameters: Parameters whose `grad` is clipped; those without one are passed over.
        max_norm: Largest allowed 2-norm.

    Returns:
        The norm before clipping as a tensor of shape () on the gradients' device: no host sync.
        It is NaN or infinite where a gradient is; that isn't an error here.
    """
    given = list(parameters)
    # torch's batched operations where the device has them; else torch chooses.
    foreach = True if not given or features(given[0].device).has_foreach else None
    return clip_grad_norm_(given, max_norm, error_if_nonfinite=False, foreach=foreach)
