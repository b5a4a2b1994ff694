"""The losses that a job may name."""

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.errors import JobError, UsageError
from paceline.trainer.job import LossFunction, LossName


def as_scores(outputs: object) -> Tensor:
    """Check what a model gave, and bring it to fp32 for the loss.

    Raises:
        JobError: It isn't a tensor.
    """
    if not isinstance(outputs, Tensor):
        raise JobError(
            f"the model gave a {type(outputs).__name__}; it should give one tensor, which the loss "
            "and the accuracy are taken from"
        )
    half = outputs.is_floating_point() and outputs.dtype in (torch.bfloat16, torch.float16)
    return outputs.float() if half else outputs


def build_loss(loss: LossName | LossFunction, label_smoothing: float) -> LossFunction:
    """Turn a job's loss into a function (outputs, targets) -> mean over the samples.

    Raises:
        UsageError: Label smoothing was asked for and the loss is the job's own function.
    """
    if callable(loss):
        if label_smoothing:
            raise UsageError(
                "--label-smoothing works with the losses cross_entropy and nll; "
                "this job brings a loss function of its own"
            )
        return loss
    named = {"cross_entropy": _cross_entropy, "nll": _nll}
    if loss not in named:
        raise UsageError(f"unknown loss {loss!r}. Known: {', '.join(named)}, or a function")
    return named[loss](label_smoothing)


def _cross_entropy(smoothing: float) -> LossFunction:
    def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, label_smoothing=smoothing)

    return cross_entropy


def _nll(smoothing: float) -> LossFunction:
    if not smoothing:
        return F.nll_loss

    def smoothed_nll(outputs: Tensor, targets: Tensor) -> Tensor:  # outputs: log-probabilities
        return (1 - smoothing) * F.nll_loss(outputs, targets) - smoothing * outputs.mean()

    return smoothed_nll
