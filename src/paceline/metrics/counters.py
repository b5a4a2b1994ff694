"""Loss and accuracy of training, counted on the device and fetched rarely."""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor


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
        outputs: (N, C) scores.
        targets: (N,) class numbers.
        top: 1, or 5 to also count classes among the five best.

    Returns:
        (top,) int64 on the device: how many classes were the best guess, the second best ..
    """
    scores = outputs.detach()  # cheaper than no_grad, which is Python
    if top == 1:
        return (scores.argmax(1) == targets).sum(0, keepdim=True)
    right = scores.topk(top, dim=1).indices == targets.unsqueeze(1)  # (N, top)
    return right.sum(0)


@final
class StepCounters:
    """Collects each step's loss and right guesses as device scalars; `flush` fetches them at once.

    Local to a worker: nothing here is collective.
    """

    def __init__(self) -> None:
        self.totals = Totals()
        self._losses: list[Tensor] = []
        self._correct: list[Tensor] = []
        self._samples: list[int] = []
        self._steps: list[int] = []

    def add(self, loss: Tensor, samples: int, correct: Tensor | None, step: int) -> None:
        """Note one forward pass; no host sync.

        Args:
            loss: Scalar mean loss of this worker's samples, detached.
            samples: How many there were.
            correct: What `count_correct` gave; None where accuracy has no meaning.
            step: The step it belongs to, to name it where the loss isn't finite.
        """
        self._losses.append(loss)
        self._samples.append(samples)
        self._steps.append(step)
        if correct is not None:
            self._correct.append(correct)

    def flush(self) -> int | None:
        """Fetch what was collected into `totals`: one host sync.

        Returns:
            The first step whose loss isn't finite; None if all are.
        """
        if not self._losses:
            return None
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

    def _forget(self) -> None:
        self._losses, self._correct, self._samples, self._steps = [], [], [], []
