"""BatchNorm with statistics over the batches of all workers, on CPUs as well as on GPUs.

PyTorch's own SyncBatchNorm refuses CPU tensors, and on GPUs it waits for the device three times a
layer and step, to leave out workers without samples; here they count as next to nothing. Its
kernels are taken. Source: Ioffe and Szegedy, 2015, algorithm 1, with sums over all workers.
"""

from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from paceline.distributed.device import has_batchnorm_kernels, widest_float

_NO_VALUES = 1e-30
"""How many values a worker without samples has: 0 would be divided by."""


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
        """Each worker's input reaches every worker's output: the gradients add up.

        By this function again, so that a gradient of gradients (a penalty on them) is right too.
        """
        total: Tensor = _SumOverWorkers.apply(gradient)
        return total


@torch.compiler.disable  # type: ignore[untyped-decorator]  # untyped in torch
def _sum_over_workers(local: Tensor) -> Tensor:
    """Sum over workers, outside of what is compiled. Collective in both directions.

    Inductor (torch 2.15) computes other numbers where two such sums are in one graph.
    """
    total: Tensor = _SumOverWorkers.apply(local)
    return total


@final
class _ByKernels(torch.autograd.Function):
    """BatchNorm over all workers by PyTorch's kernels for it. Collective in both directions.

    Nothing waits for the device: all rows of the gathered statistics count, also those of workers
    without samples. C is the number of channels, W that of workers.
    """

    @staticmethod
    def forward(
        ctx: Any,  # torch's
        inputs: Tensor,  # (N, C, ...), dense
        weight: Tensor | None,  # (C,)
        bias: Tensor | None,
        tracked: tuple[Tensor | None, Tensor | None],
        momentum: float,
        eps: float,
        by_sum: bool,
    ) -> Tensor:
        """Normalise, and move the running statistics on."""
        # This worker's mean and 1 / sqrt(var + eps), and of how many values: (C,), (C,), (1,)
        channels, is_empty = inputs.shape[1], not inputs.numel()
        if is_empty:
            mean, scale = inputs.new_tensor([[0.0], [1.0]], dtype=torch.float32).expand(2, channels)
        else:
            mean, scale = torch.batch_norm_stats(inputs, eps)
        count = mean.new_full((1,), _NO_VALUES if is_empty else inputs.numel() // channels)
        rows = _gathered(torch.cat([mean, scale, count]), by_sum=by_sum)  # (W, 2C + 1)
        means, scales, counts = rows.split([channels, channels, 1], dim=1)
        counts = counts.flatten()
        # Those of all workers together; the kernel reads counts as what it keeps up
        kept = inputs if tracked[0] is None else tracked[0]
        mean, scale = torch.batch_norm_gather_stats_with_counts(
            inputs, means, scales, *tracked, momentum, eps, counts.to(kept.dtype)
        )
        ctx.save_for_backward(inputs, weight, mean, scale, counts.to(torch.int32))
        if is_empty:
            return torch.empty_like(inputs)
        outputs: Tensor = torch.batch_norm_elemt(inputs, weight, bias, mean, scale, eps)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Give the gradients of inputs, weight and bias; the latter two are this worker's own.

        The kernels have no gradient of their own: one of gradients is an error.
        """
        inputs, weight, mean, scale, counts = ctx.saved_tensors
        gradient = _dense(gradient)
        wanted = ctx.needs_input_grad
        # Sums over this worker's values, of dy and of dy * (x - mean): (C,) each
        if inputs.numel():
            *sums, of_weight, of_bias = torch.batch_norm_backward_reduce(
                gradient, inputs, mean, scale, weight, *wanted[:3]
            )
        else:
            *sums, of_weight, of_bias = mean.new_zeros(4, len(mean))
        of_inputs = None
        if wanted[0]:
            total = torch.cat(sums)
            dist.all_reduce(total)
            of_all, with_means = total.chunk(2)
            of_inputs = torch.empty_like(inputs)
            if inputs.numel():
                of_inputs = torch.batch_norm_backward_elemt(
                    gradient, inputs, mean, scale, weight, of_all, with_means, counts
                )
        own = (of_weight if wanted[1] else None, of_bias if wanted[2] else None)
        return of_inputs, *own, None, None, None, None


def _gathered(row: Tensor, *, by_sum: bool) -> Tensor:
    """Collect a row (K,) of each worker: (W, K). Collective; nothing waits for the device.

    Args:
        row: This worker's.
        by_sum: The backend gathers no such tensors: rows of zeros are summed instead.
    """
    workers = dist.get_world_size()
    if by_sum:
        rows = row.new_zeros(workers, len(row))
        rows[dist.get_rank()] = row
        dist.all_reduce(rows)
        return rows
    rows = row.new_empty(workers * len(row))
    dist.all_gather_into_tensor(rows, row)
    return rows.view(workers, -1)


def _dense(tensor: Tensor) -> Tensor:
    """Lay a tensor out as the kernels need it: contiguous, or channels-last."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    if last is not None and tensor.is_contiguous(memory_format=last):
        return tensor
    return tensor.contiguous()


@final
class SyncBatchNorm(nn.Module):
    """BatchNorm over (N, C, ...) of all workers together; parameters named as in nn.BatchNorm2d."""

    def __init__(
        self,
        source: nn.modules.batchnorm._BatchNorm,
        *,
        by_kernels: bool = False,
        by_sum: bool = False,
    ) -> None:
        """Create the sync batch norm.

        Args:
            source: Whose parameters and buffers are taken over.
            by_kernels: The device has PyTorch's kernels for it.
            by_sum: The backend can't gather tensors of the device into one.
        """
        super().__init__()
        self._by_kernels, self._by_sum = by_kernels, by_sum
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
        if self._by_kernels:
            outputs: Tensor = self._normalised_by_kernels(_dense(inputs))
            return outputs
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

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # untyped in torch
    def _normalised_by_kernels(self, inputs: Tensor) -> Tensor:
        normalise = partial(_ByKernels.apply, inputs, self.weight, self.bias)
        tracked = (self.running_mean, self.running_var)
        if self.running_mean is not None and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if self.running_mean is None or self.momentum is not None:
            outputs: Tensor = normalise(tracked, self.momentum or 0.0, self.eps, self._by_sum)
            return outputs
        # momentum=None asks for the cumulative average, whose weight only the device knows: take
        # the batch's own statistics from the kernel, by a momentum of 1.
        own = [torch.zeros_like(buffer) for buffer in tracked if buffer is not None]
        outputs = normalise(tuple(own), 1.0, self.eps, self._by_sum)
        assert self.num_batches_tracked is not None
        weight = self.num_batches_tracked.to(own[0].dtype).reciprocal()
        for buffer, batch in zip(tracked, own, strict=True):
            assert buffer is not None
            buffer.lerp_(batch, weight)
        return outputs

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
    to zero in float64, where the device has it: a mean far from zero costs the variance no digits.

    Args:
        inputs: (N, C, ...) of this worker.

    Returns:
        (C,), (C,) and a scalar, of `widest_float`.
    """
    dims = [0, *range(2, inputs.dim())]
    if inputs.numel():
        own_mean = inputs.mean(dims, keepdim=True)
    else:
        own_mean = inputs.new_zeros([1, inputs.shape[1]] + [1] * (inputs.dim() - 2))
    # sum (x - c)^2 + n c^2 = sum x^2
    exact = widest_float(inputs.device)
    squares = (inputs - own_mean).square().sum(dims).to(exact)
    centre = own_mean.flatten().to(exact)
    count = centre.new_full((1,), inputs.numel() // inputs.shape[1])
    sums = torch.cat([count * centre, squares + count * centre.square(), count])  # (2C + 1,)
    total_sum, total_square, total = _split(_sum_over_workers(sums))
    # var = E[x^2] - E[x]^2
    mean = total_sum / total
    return mean, (total_square / total - mean.square()).clamp_min(0), total


def _split(sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    channels = (sums.numel() - 1) // 2
    return sums[:channels], sums[channels:-1], sums[-1]


def synchronise_batchnorm(
    model: nn.Module, device: torch.device, *, by_sum: bool = False
) -> nn.Module:
    """Replace every BatchNorm of a model by one that sees the batches of all workers.

    Names in `state_dict()` stay the same.

    Args:
        model: Changed in place; returned too, for a model that is itself a BatchNorm.
        device: Where the model is.
        by_sum: The backend can't gather tensors of the device into one: sums have to do.
    """
    if isinstance(model, nn.modules.batchnorm._BatchNorm):
        return SyncBatchNorm(model, by_kernels=has_batchnorm_kernels(device), by_sum=by_sum)
    for name, child in model.named_children():
        setattr(model, name, synchronise_batchnorm(child, device, by_sum=by_sum))
    return model
