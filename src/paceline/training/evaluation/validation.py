"""Evaluation in the middle of a training: the models' mode, progress, time, the epoch's figures."""

from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import final

import torch
from torch import Tensor, nn

from paceline.data.batch import Batch
from paceline.launch.heartbeat import EVALUATING, StepNote
from paceline.training.batches.loader import EvalLoader
from paceline.training.context import TrainingContext
from paceline.training.evaluation.distributed_mean import BatchMetrics, Metrics
from paceline.training.progress import describe_too_long
from paceline.training.status_exchange import StopFlag, agree_on_pause

_TIMING_S = 2.0
"""For timing an evaluation by its first batches, at most, or one batch."""

_VALIDATED_TWICE = (
    "several s.evaluate(...) of an epoch give loss or accuracy: the last one's count as its "
    "validation, for the best snapshot, early stopping and targets. Give those of other data other "
    "names, such as test_accuracy"
)


@final
@dataclass(frozen=True, kw_only=True)
class Validation:
    """Evaluates the models of a training. All methods are collective unless they say otherwise."""

    context: TrainingContext
    note: StepNote
    stop_flag: StopFlag

    @contextmanager
    def models_evaluated(self, save: Callable[[], None] | None) -> Iterator[None]:
        """Put the models into evaluation mode: all workers' running statistics, no gradients.

        Args:
            save: Takes a snapshot, where a signal ends the evaluation.
        """
        context, progress = self.context, self.context.progress
        self.note.operation = EVALUATING
        with (
            context.buffer_averager.averaged_buffers(),
            context.components.evaluated_weights(),
            torch.no_grad(),
            eval_mode(context.components.model),
        ):
            yield
        progress.add_evaluation(agree_on_pause(progress.lap(), self.stop_flag, context.group, save))
        context.profiler.evaluated(progress.state)

    def batches(self, loader: EvalLoader, what: str = "") -> Iterator[Batch]:
        """Give an evaluation's batches, unless a signal ends it, and show how far it is.

        Args:
            what: Its name on the screen; of the open epoch's validation by default.
        """
        context, total = self.context, 0 if loader.served.is_stream else len(loader)
        place = f"epoch {context.progress.state.epoch + 1}/{context.config.loop.epochs}"
        title = what or (f"{place} validation" if context.epoch.is_open else "evaluation")
        for done, batch in enumerate(self.stop_flag.until_signal(loader.batches())):
            context.console.evaluating(title, done, total)
            yield batch

    def measure_time(self, judge: BatchMetrics, loader: EvalLoader) -> None:
        """Time an evaluation by its first batches, where a time budget must leave room for it."""
        context, progress = self.context, self.context.progress
        budget_s, group = progress.budget_s, context.group
        if budget_s is None or progress.state.eval_s is not None or not loader.num_samples:
            return
        self.note.operation = EVALUATING
        with torch.no_grad(), eval_mode(context.components.model):
            sample_s = time_batches(judge, loader.batches(), min(_TIMING_S, budget_s / 20))
        eval_s = -(-loader.num_samples // group.world_size) * sample_s
        # The slowest worker's time counts; rank 0's clock says how long the timing itself took.
        rows = group.gather_rows(torch.tensor([eval_s, progress.lap()], dtype=torch.float64))
        progress.timed_eval_s = float(rows[:, 0].max())
        progress.add_pause(float(rows[0, 1]))
        warning = describe_too_long(
            progress.closing_evals_s(), str(progress.loop.time_budget), budget_s
        )
        if warning is not None and group.rank == 0:
            context.console.warn(warning)
        self.note.operation = "script"

    def record(self, figures: Metrics, samples: int, loader: object = None) -> None:
        """Make figures the open epoch's validation result; others are logged as they are. Local."""
        for after_evaluation in self.context.hooks.after_evaluation:
            after_evaluation(figures, samples)
        epoch = self.context.epoch
        if not epoch.is_open:
            return
        is_first, epoch.validated = not epoch.validated, True
        others = self.context.progress.take_validation(figures, samples, is_first=is_first)
        if len(others) < len(figures):
            before, epoch.validated_on = epoch.validated_on, loader
            if before not in (None, loader):
                self.context.optimizer_step.report_once(_VALIDATED_TWICE)
        epoch.logged |= others


def time_batches(
    judge: BatchMetrics,
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
