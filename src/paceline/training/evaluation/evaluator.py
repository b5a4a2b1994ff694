"""Evaluation that counts every sample exactly once, on any number of workers."""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import final

import torch
from torch import Tensor, nn

from paceline.data.batch import Batch, BatchSource
from paceline.distributed.group import Group
from paceline.errors import JobError
from paceline.metrics.counters import StepCounters, Totals
from paceline.training.job import LossFunction
from paceline.training.losses import as_scores


@final
@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Evaluates a model with a loss and, for classes, accuracies."""

    loss: LossFunction
    forward_context: Callable[[], AbstractContextManager[object]]
    top: int
    """5 to also count classes among the five best guesses, 1 for the best alone, 0 for neither."""
    batch_size: int
    """Samples that a worker passes through the model at once."""

    def run(
        self, model: nn.Module, source: BatchSource, group: Group, num_classes: int = 0
    ) -> tuple[Totals, Tensor]:
        """Evaluate a model on all samples. Collective.

        Args:
            model: The unwrapped model; left in the mode it was in.
            source: What to evaluate on; each worker takes a contiguous share.
            num_classes: Above 0, to count a confusion matrix.

        Returns:
            Sums over all samples, and (num_classes, num_classes) int64 counts on the CPU, rows by
            true class, the same on every worker.

        Raises:
            RuntimeError: The workers together didn't count each sample once (a bug of ours).
        """
        # Count this worker's share on the device.
        counters = StepCounters(self.top)
        confusion = torch.zeros(num_classes * num_classes, dtype=torch.int64, device=group.device)
        with torch.no_grad(), eval_mode(model):
            for batch in source.eval_batches(group.rank, group.world_size, self.batch_size):
                inputs, targets = batch.pair()
                with self.forward_context():
                    outputs = model(inputs)
                outputs = as_scores(outputs)
                loss = self.loss(outputs, targets)
                counters.add(loss, batch.local, 0, outputs, targets)
                if num_classes:
                    _check_width(outputs, num_classes)
                    cells = targets * num_classes + outputs.argmax(1)
                    confusion += torch.bincount(cells, minlength=len(confusion))
        # Add up over the workers, and check that each sample was counted once.
        counters.flush()
        totals = Totals.from_row(group.gather_rows(counters.rows()[0]).sum(0))
        if totals.samples != source.num_samples:
            raise RuntimeError(f"evaluated {totals.samples} of {source.num_samples} samples")
        summed = group.sum_(confusion.cpu())
        return totals, summed.view(num_classes, num_classes)


def _check_width(outputs: Tensor, num_classes: int) -> None:
    if outputs.ndim != 2 or outputs.shape[1] != num_classes:
        raise JobError(
            f"the model gives outputs of shape {tuple(outputs.shape)} for {num_classes} classes; a "
            "confusion matrix needs (samples, classes): set the job's num_classes"
        )


def time_batches(
    judge: Callable[[object], Mapping[str, Tensor | float]],
    batches: Generator[Batch],
    most_s: float,
    clock: Callable[[], float] = perf_counter,
) -> float:
    """Time the first batches of an evaluation, until `most_s` seconds have gone by.

    The very first one warms up, for half a minute where code is compiled, and counts only where
    there is no other.

    Returns:
        Seconds that a sample takes, its reading included; 0 without a batch.
    """
    laps: list[tuple[int, float]] = []
    from_s = begun_s = clock()
    with closing(batches):
        for batch in batches:
            for value in judge(batch.content).values():
                if isinstance(value, Tensor):
                    value.sum().item()  # waits for the device
            now_s = clock()
            laps.append((batch.local, now_s - from_s))
            from_s = now_s
            if now_s - begun_s >= most_s and len(laps) > 1:
                break
    warm = laps[1:] or laps
    samples = sum(samples for samples, _ in warm)
    return sum(lap_s for _, lap_s in warm) / samples if samples else 0.0


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and every module of it back into the mode it was in."""
    modes = [(child, child.training) for child in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for child, was_training in modes:
            child.training = was_training
