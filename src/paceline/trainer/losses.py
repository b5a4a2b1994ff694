"""The losses that a job may name."""

from torch import Tensor
from torch.nn import functional as F

from paceline.errors import UsageError
from paceline.trainer.job import LossFunction, LossName


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
