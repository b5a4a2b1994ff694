"""Loss functions that a `Job` can choose by name."""

from functools import partial
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.errors import JobError, UsageError
from paceline.training.job import LossFunction, LossName

_IGNORED = -100
"""What the losses of torch leave out unless they are told another class."""


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
    dtype = outputs.dtype
    if dtype is torch.float32:
        return outputs
    return outputs.float() if dtype in (torch.bfloat16, torch.float16) else outputs


def build_loss(
    loss: LossName | LossFunction, label_smoothing: float, num_classes: int | None = None
) -> LossFunction:
    """Turn a job's loss into a function (outputs, targets) -> mean over the samples.

    Args:
        label_smoothing: For the losses that are known by name.
        num_classes: What the model should give a score for; None where that isn't known.

    Raises:
        UsageError: Label smoothing was asked for and the loss is the job's own function.
        JobError: The loss adds samples up or keeps them apart.
    """
    if callable(loss):
        if label_smoothing:
            raise UsageError(
                "--label-smoothing works with the losses cross_entropy and nll; "
                "this job brings a loss function of its own"
            )
        _refuse_reduction(loss)
        return CheckedLoss(loss, num_classes, _ignored_by(loss))
    named = {"cross_entropy": _cross_entropy, "nll": _nll}
    if loss not in named:
        raise UsageError(f"unknown loss {loss!r}. Known: {', '.join(named)}, or a function")
    return CheckedLoss(named[loss](label_smoothing), num_classes, _IGNORED)


@final
class CheckedLoss:
    """A loss function with clear errors if outputs and targets don't fit together.

    Shapes and classes are looked at the first time alone, so that a step costs no more. That is
    before the loss is computed: on a GPU its kernel would end the process without a number.
    """

    def __init__(
        self, function: LossFunction, num_classes: int | None, ignored: int | None
    ) -> None:
        """Create the checked loss.

        Args:
            function: The loss itself.
            num_classes: What the model should give a score for; None where that isn't known.
            ignored: The target that it leaves out; None where targets may be no classes.
        """
        self._function = function
        self._num_classes = num_classes
        self._ignored = ignored
        self._looked = False

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Give the mean loss, a scalar.

        Raises:
            JobError: It isn't a scalar, or the model has no score for a target's class.
        """
        if not self._looked:
            self._check_width(outputs)
            self._check_classes(outputs, targets)
        try:
            loss = self._function(outputs, targets)
            return loss if self._looked else self._checked(loss)
        except IndexError as error:  # how the losses of torch tell it on the CPU
            if "out of bounds" not in str(error) or outputs.ndim < 2:
                raise
            raise JobError(_no_such_class(outputs, targets)) from error

    def _checked(self, loss: Tensor) -> Tensor:
        if not isinstance(loss, Tensor) or loss.ndim:
            found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise JobError(
                f"the job's loss gave {found} instead of one number; "
                "it should be the mean over the samples (reduction='mean')"
            )
        self._looked = True
        return loss

    def _check_width(self, outputs: Tensor) -> None:
        classes = self._num_classes
        if classes is not None and outputs.ndim > 1 and outputs.shape[1] != classes:
            raise JobError(
                f"the model gives {outputs.shape[1]} scores a sample, and there are {classes} "
                "classes: give its last layer as many outputs, or set the job's num_classes"
            )

    def _check_classes(self, outputs: Tensor, targets: Tensor) -> None:
        """Check the first batch's classes; waits for the device, hence only once."""
        are_classes = outputs.ndim == 2 and targets.ndim == 1 and targets.dtype is torch.int64
        if self._ignored is None or not are_classes or not targets.numel():
            return
        known = torch.where(targets == self._ignored, 0, targets)
        least, most = torch.stack(known.aminmax()).tolist()
        if least < 0 or most >= outputs.shape[1]:
            raise JobError(_no_such_class(outputs, known))


def _ignored_by(loss: LossFunction) -> int | None:
    """Give the target that a loss of torch leaves out; None where targets may be no classes."""
    inner, given = (loss.func, loss.keywords) if isinstance(loss, partial) else (loss, {})
    if isinstance(inner, nn.CrossEntropyLoss | nn.NLLLoss):
        return inner.ignore_index
    if inner in (F.cross_entropy, F.nll_loss):
        return int(given.get("ignore_index", _IGNORED))
    return None


def _no_such_class(outputs: Tensor, targets: Tensor) -> str:
    least, most = int(targets.min()), int(targets.max())
    wrong = most if most >= outputs.shape[1] else least
    return (
        f"a target is class {wrong}, but the model gives {outputs.shape[1]} scores a sample, for "
        f"the classes 0 to {outputs.shape[1] - 1}. Widen the model's last layer, or number the "
        "classes from 0"
    )


def _refuse_reduction(loss: LossFunction) -> None:
    """Refuse a loss that says of itself that it doesn't take the mean: steps would be too long."""
    given = loss.keywords if isinstance(loss, partial) else {}
    reduction = given.get("reduction", getattr(loss, "reduction", "mean"))
    if reduction != "mean":
        raise JobError(
            f"the job's loss has reduction={reduction!r}; it should be 'mean', the mean over the "
            "samples, whatever the size of the batch"
        )


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
