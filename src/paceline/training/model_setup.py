"""A user's model on its device: memory format, precision, synchronised BatchNorm, compilation."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from paceline.data.batch import map_tensors
from paceline.distributed.group import Group
from paceline.gradient_sync.batchnorm import synchronise_batchnorm
from paceline.gradient_sync.replica import Forward
from paceline.training.options import ComputeOptions


def takes_channels_last(module: nn.Module, options: ComputeOptions) -> bool:
    """Tell whether a network's images are laid out channels-last: by the options, or if faster."""
    if options.memory_format != "auto":
        return options.memory_format == "channels-last"
    return any(isinstance(part, nn.Conv2d) for part in module.modules())


def placed(
    module: nn.Module, options: ComputeOptions, group: Group, *, channels_last: bool
) -> nn.Module:
    """Bring a module to the group's device, laid out and normalising as the options ask for.

    Parameters stay the objects they are. Only a module that is itself a BatchNorm is replaced.
    """
    module.to(group.device)
    if channels_last:
        module.to(memory_format=torch.channels_last)
    if options.sync_batchnorm and group.world_size > 1:
        few = group.has_few_operations
        return synchronise_batchnorm(module, group.device, few_operations=few)
    return module


def compiled(module: nn.Module) -> Forward:
    """Give a module's forward pass, compiled by torch.compile at its first use."""
    forward: Forward = torch.compile(module.forward)
    return forward


def upcasting(forward: Forward, context: Callable[[], AbstractContextManager[object]]) -> Forward:
    """Run a forward pass under autocast, and give its half-precision outputs as fp32.

    So that a loss computed outside is as exact as one computed inside.
    """

    def run(*args: object, **kwargs: object) -> object:
        with context():
            outputs = forward(*args, **kwargs)
        return map_tensors(outputs, _upcast)

    return run


def _upcast(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
