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

    def __init__(self, top: int | None = 0, parts: range = range(1)) -> None:
        """Start from zero.

        Args:
            top: 1, or 5 to also count classes among the five best guesses; 0 counts no guesses;
                None settles it by the first scores: 5 where there are more than five classes.
            parts: Parts (shards) of a step that this worker goes through. Their losses are summed
                apart, so that the sum of all doesn't depend on who goes through which.
        """
        self.top = top
        self._parts = parts
        self._by_part = [Totals() for _ in parts]
        self._losses: list[Tensor] = []
        self._outputs: list[Tensor] = []
        self._targets: list[Tensor] = []
        self._uncounted = 0
        self._correct: list[Tensor] = []
        self._notes: list[tuple[int, int, int]] = []
        """Samples, step and part of each loss."""

    def rows(self) -> Tensor:
        """Give the sums by part: (parts, 4) float64, see `Totals.as_row`."""
        first, *others = self._by_part
        if not others:
            return first.as_row().unsqueeze(0)
        return torch.stack([totals.as_row() for totals in self._by_part])

    def add(
        self,
        loss: Tensor,
        samples: int,
        step: int,
        outputs: Tensor | None = None,
        targets: Tensor | None = None,
        part: int = 0,
    ) -> None:
        """Note one forward pass; no host sync.

        Args:
            loss: Scalar mean loss of this worker's samples.
            step: The step it belongs to, to name it where the loss isn't finite.
            outputs: (N, C) scores; kept as they are until they are counted.
            targets: (N,) class numbers, likewise.
            part: Which of this worker's parts it was.
        """
        self._losses.append(loss.detach())
        self._notes.append((samples, step, part))
        if self.top != 0 and outputs is not None and targets is not None:
            if self.top is None:
                self.top = 5 if outputs.shape[1] > 5 else 1
            self._outputs.append(outputs.detach())
            self._targets.append(targets)
            self._uncounted += outputs.numel()
            if self._uncounted > _MOST_UNCOUNTED:
                self._count()

    def flush(self) -> int | None:
        """Fetch what was collected and add it to the sums: one host sync.

        Returns:
            The first step whose loss isn't finite; None if all are.
        """
        if not self._losses:
            return None
        self._count()
        # The only place that waits for the device: all steps since the last flush at once.
        losses = torch.stack(self._losses).tolist()
        correct = torch.stack(self._correct).sum(0).tolist() if self._correct else [0]  # (top,)
        bad: int | None = None
        all_finite = all(map(math.isfinite, losses))
        for (samples, step, part), loss in zip(self._notes, losses, strict=True):
            totals = self._by_part[part - self._parts.start]
            # Losses are means: weighted by their samples they give the mean over all.
            totals.loss += samples * loss
            totals.samples += samples
            if not all_finite and bad is None and not math.isfinite(loss):
                bad = step
        # Counts of right answers are whole numbers, the same in any order: one part holds all.
        self._by_part[0].top1 += correct[0]
        self._by_part[0].top5 += sum(correct)
        self._forget()
        return bad

    def reset(self, rows: Tensor | None = None) -> None:
        """Start an epoch, from zero or from what `rows` gave."""
        self._forget()
        self._by_part = [Totals() for _ in self._parts]
        if rows is not None:
            self._by_part = [Totals.from_row(row) for row in rows]

    def _count(self) -> None:
        """Count the right guesses of several steps together: cheaper than step by step."""
        if self._outputs:
            outputs, targets = torch.cat(self._outputs), torch.cat(self._targets)
            self._correct.append(count_correct(outputs, targets, self.top or 1))
        self._outputs, self._targets, self._uncounted = [], [], 0

    def _forget(self) -> None:
        self._losses, self._correct, self._notes = [], [], []
        self._outputs, self._targets, self._uncounted = [], [], 0
