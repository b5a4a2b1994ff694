"""BatchNorm with statistics over the batches of all workers, on CPUs as well as on GPUs.

PyTorch's own SyncBatchNorm does the same on GPUs and refuses CPU tensors; there it is used.
Source: Ioffe and Szegedy, 2015, algorithm 1, with sums over all workers.
"""

from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn


@final
class _SumOverWorkers(torch.autograd.Function):
    """All-reduce whose gradient is all-reduced as well. Collective in both directions."""

    @staticmethod
    def forward(ctx: object, local: Tensor) -> Tensor:
        """Sum over workers."""
        total = local.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        """Each worker's input reaches every worker's output: the gradients add up."""
        total = gradient.clone()
        dist.all_reduce(total)
        return total


@final
class CpuSyncBatchNorm(nn.Module):
    """BatchNorm over (N, C, ...) of all workers together; parameters named as in nn.BatchNorm2d."""

    def __init__(self, source: nn.modules.batchnorm._BatchNorm) -> None:
        super().__init__()
        self.eps = source.eps
        self.momentum = source.momentum
        self.weight = source.weight
        self.bias = source.bias
        self.running_mean: Tensor | None
        self.running_var: Tensor | None
        self.num_batches_tracked: Tensor | None
        self.register_buffer("running_mean", source.running_mean)
        self.register_buffer("running_var", source.running_var)
        self.register_buffer("num_batches_tracked", source.num_batches_tracked)

    def forward(self, inputs: Tensor) -> Tensor:  # (N, C, ...) -> (N, C, ...)
        """Normalise; in training mode collective over all workers, which may hold unequal N."""
        if not self.training:  # each worker for itself: they may have unequal numbers of batches
            return nn.functional.batch_norm(
                inputs,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                training=self.running_mean is None,
                eps=self.eps,
            )
        # Statistics over all workers, in fp32 at least.
        wide = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
        mean, variance, total = _statistics(wide)  # (C,), (C,), ()
        self._track(mean, variance, total)
        # (x - mean) / sqrt(var + eps) * weight + bias, as x * scale + shift with one value a
        # channel.
        scale = torch.rsqrt(variance + self.eps).to(wide.dtype)  # (C,)
        if self.weight is not None:
            scale = scale * self.weight
        shift = -mean.to(wide.dtype) * scale
        if self.bias is not None:
            shift = shift + self.bias
        shape = [1, -1] + [1] * (inputs.dim() - 2)
        return (wide * scale.view(shape) + shift.view(shape)).to(inputs.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, total: Tensor) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        momentum = self.momentum
        # momentum=None asks for the cumulative average, as in nn.BatchNorm2d.
        if momentum is None and self.num_batches_tracked is not None:
            momentum = 1.0 / float(self.num_batches_tracked)
        # The running variance is the unbiased one: n / (n - 1), n over all workers.
        unbiased = variance * (total / (total - 1).clamp_min(1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum or 0.0)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum or 0.0)


def _statistics(inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Take mean, variance and number of values over the batches of all workers. Collective.

    A worker's squares are summed around its own mean and only then, a few numbers a channel, moved
    to zero in float64: a mean far from zero costs no digits of the variance.

    Args:
        inputs: (N, C, ...) of this worker.

    Returns:
        (C,), (C,) and a scalar, float64.
    """
    dims = [0, *range(2, inputs.dim())]
    own_mean = inputs.mean(dims, keepdim=True)
    # sum (x - c)^2 + n c^2 = sum x^2
    squares = (inputs - own_mean).square().sum(dims).double()
    centre = own_mean.flatten().double()
    count = centre.new_tensor([inputs.numel() // inputs.shape[1]])
    sums = torch.cat([count * centre, squares + count * centre.square(), count])  # (2C + 1,)
    total_sum, total_square, total = _split(_SumOverWorkers.apply(sums))
    # var = E[x^2] - E[x]^2, in float64
    mean = total_sum / total
    return mean, (total_square / total - mean.square()).clamp_min(0), total


def _split(sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    channels = (sums.numel() - 1) // 2
    return sums[:channels], sums[channels:-1], sums[-1]


def synchronise_batchnorm(
    model: nn.Module, device: torch.device, *, few_operations: bool = False
) -> nn.Module:
    """Replace every BatchNorm of a model by one that sees the batches of all workers.

    Names in `state_dict()` stay the same.

    Args:
        model: Changed in place; returned too, for a model that is itself a BatchNorm.
        device: GPUs get PyTorch's SyncBatchNorm.
        few_operations: The backend lacks an operation that PyTorch's needs: ours does with sums.
    """
    # PyTorch's, where it works; it refuses CPU tensors and needs all-gather.
    if device.type == "cuda" and not few_operations:
        synced: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return synced
    if isinstance(model, nn.modules.batchnorm._BatchNorm):
        return CpuSyncBatchNorm(model)
    for name, child in model.named_children():
        setattr(model, name, synchronise_batchnorm(child, device, few_operations=few_operations))
    return model
