"""Loss and accuracy of training, counted on the device and fetched rarely."""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

_MOST_UNCOUNTED = 1 << 18
"""Scores that are kept for counting, at most (and one batch): a megabyte."""


@dataclass(kw_only=True)
class Totals:
    """Sums over samples; they add up exactly over batches and workers."""

    loss: float = 0.0
    """Sum of the per-sample losses, float64."""
    samples: int = 0
    top1: int = 0
    """Samples whose best guess is right."""
    top5: int = 0
    """Samples whose class is among the five best guesses."""

    @property
    def mean_loss(self) -> float:
        """Mean loss a sample; NaN where nothing was counted."""
        return self.loss / self.samples if self.samples else math.nan

    @property
    def accuracy(self) -> float:
        """Share of samples whose best guess is right; NaN where nothing was counted."""
        return self.top1 / self.samples if self.samples else math.nan

    @property
    def top5_accuracy(self) -> float:
        """Share of samples whose class is among the five best guesses."""
        return self.top5 / self.samples if self.samples else math.nan

    def as_row(self) -> Tensor:
        """Give the sums as (4,) float64, for adding over workers."""
        return torch.tensor([self.loss, self.samples, self.top1, self.top5], dtype=torch.float64)

    @staticmethod
    def from_row(row: Tensor) -> "Totals":
        """Read what `as_row` made (or a sum of such rows)."""
        loss, samples, top1, top5 = row.tolist()
        return Totals(loss=loss, samples=int(samples), top1=int(top1), top5=int(top5))


def count_correct(outputs: Tensor, targets: Tensor, top: int) -> Tensor:
    """Count right guesses without waiting for the device.

    Args:
        outputs: (N, C) scores, detached.
        targets: (N,) class numbers.
        top: 1, or 5 to also count classes among the five best.

    Returns:
        (top,) int64 on the device: how many classes were the best guess, the second best ..
    """
    if top == 1:
        return (outputs.argmax(1) == targets).sum(0, keepdim=True)
    right = outputs.topk(top, dim=1).indices == targets.unsqueeze(1)  # (N, top)
    return right.sum(0)


@final
class StepCounters:
    """Collects each step's loss and outputs on the device; `flush` counts and fetches them at once.

    Local to a worker: nothing here is collective.
    """

    def __init__(self, top: int | None = 0) -> None:
        """Start from zero.

        Args:
            top: 1, or 5 to also count classes among the five best guesses; 0 counts no guesses;
                None settles it by the first scores: 5 where there are more than five classes.
        """
        self.totals = Totals()
        self.top = top
        self._losses: list[Tensor] = []
        self._outputs: list[Tensor] = []
        self._targets: list[Tensor] = []
        self._uncounted = 0
        self._correct: list[Tensor] = []
        self._samples: list[int] = []
        self._steps: list[int] = []

    def add(
        self,
        loss: Tensor,
        samples: int,
        step: int,
        outputs: Tensor | None = None,
        targets: Tensor | None = None,
    ) -> None:
        """Note one forward pass; no host sync.

        Args:
            loss: Scalar mean loss of this worker's samples.
            samples: How many.
            step: The step it belongs to, to name it where the loss isn't finite.
            outputs: (N, C) scores; kept as they are until they are counted.
            targets: (N,) class numbers, likewise.
        """
        self._losses.append(loss.detach())
        self._samples.append(samples)
        self._steps.append(step)
        if self.top != 0 and outputs is not None and targets is not None:
            if self.top is None:
                self.top = 5 if outputs.shape[1] > 5 else 1
            self._outputs.append(outputs.detach())
            self._targets.append(targets)
            self._uncounted += outputs.numel()
            if self._uncounted > _MOST_UNCOUNTED:
                self._count()

    def flush(self) -> int | None:
        """Fetch what was collected into `totals`: one host sync.

        Returns:
            The first step whose loss isn't finite; None if all are.
        """
        if not self._losses:
            return None
        self._count()
        losses = torch.stack(self._losses).tolist()
        correct = torch.stack(self._correct).sum(0).tolist() if self._correct else [0]  # (top,)
        pairs = zip(self._steps, losses, strict=True)
        bad = next((step for step, loss in pairs if not math.isfinite(loss)), None)
        self.totals.loss += sum(n * loss for n, loss in zip(self._samples, losses, strict=True))
        self.totals.samples += sum(self._samples)
        self.totals.top1 += correct[0]
        self.totals.top5 += sum(correct)
        self._forget()
        return bad

    def reset(self, totals: Totals | None = None) -> None:
        """Start an epoch, from zero or from what a snapshot held."""
        self._forget()
        self.totals = totals or Totals()

    def _count(self) -> None:
        """Count the right guesses of several steps together: cheaper than step by step."""
        if self._outputs:
            outputs, targets = torch.cat(self._outputs), torch.cat(self._targets)
            self._correct.append(count_correct(outputs, targets, self.top or 1))
        self._outputs, self._targets, self._uncounted = [], [], 0

    def _forget(self) -> None:
        self._losses, self._correct, self._samples, self._steps = [], [], [], []
        self._outputs, self._targets, self._uncounted = [], [], 0
