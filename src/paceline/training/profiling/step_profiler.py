"""Profiles this worker: all steps are timed, one in each half second is sampled in detail."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import final

import torch
from torch import Tensor, nn

from paceline.data.batch import Batch
from paceline.distributed.device import is_accelerator
from paceline.launch.heartbeat import StepNote
from paceline.training.profiling.gradient_timing import GradientTimes
from paceline.training.profiling.step_timeline import (
    BatchWaits,
    Moment,
    StepEvent,
    StepSample,
    now,
    seconds_between,
    seconds_within,
    share_out,
)
from paceline.training.status_exchange import Status

_EARLY = 5
"""Looks at the first steps, one after another; the first of all is like no other."""
_KEPT = 64
"""Looks that are remembered, spread over the whole training."""
_LAPS = 512
_NEVER = 1 << 62
_WAITS = (("computed", "gradients"), ("sent", "came"))
"""What comes after what where a worker waits for gradients."""

Marks = list[tuple[StepEvent, Moment]]


@dataclass(frozen=True, kw_only=True)
class Lap:
    """Steps between two exchanges, without a snapshot or an evaluation in between."""

    steps: int
    seconds: float
    agreeing_s: float
    """The part of it that the exchange took: waiting for the other workers, mostly."""
    until: int = 0
    """Steps done at its end: the same lap of another worker has the same."""
    data_s: float | None = None
    """The part of it that was spent waiting for batches; None where others were waited for too."""


@final
class StepProfiler:
    """Samples single steps in detail, and times all steps.

    The first steps are sampled, the first one of each pass, and one in each half second (or in
    each epoch that is shorter): on
    every worker the same. What a worker computes itself ends when autograd has gone through its
    graph; what is left of the backward pass then is the wait for gradients. On a GPU events are
    recorded in the stream, so that the host doesn't wait; they are read at an exchange, when they
    have long passed. One object, since a step that isn't sampled must cost one comparison.
    """

    def __init__(
        self,
        note: StepNote,
        device: torch.device,
        world_size: int,
        parameters: Callable[[], Mapping[str, nn.Parameter]],
    ) -> None:
        """Create the step profiler.

        Args:
            note: Where the result goes, and that a backward pass's collective is under way.
            device: Of this worker.
            world_size: Number of workers; a single one waits for nobody.
            parameters: Gives those whose gradients' times are taken, by name.
        """
        self.next_sample = 0
        """Before the batch of this step (from 0) is asked for, `sample` has to be called."""
        self.is_sampling = False
        """Whether the step under way is sampled."""
        self.sampled = 0
        """Steps sampled so far."""
        self.loader_starts_s: list[float] = []
        """Seconds that each pass waited for its first batch."""
        self.on_gpu = is_accelerator(device)
        self.gradients = GradientTimes(on_gpu=self.on_gpu)
        self.batch_waits = BatchWaits() if self.on_gpu else None
        """Where a GPU has a clock of its own; a host that computes itself waits for them."""
        self._note = note
        self._alone = world_size == 1
        self._parameters = parameters
        self._planned = _NEVER
        """The step that is to be sampled next."""
        self._pass_from_s: float | None = None
        """Since when the first batch of a pass is awaited."""
        self._step = 0
        self._is_first = self._is_hooked = False
        """Whether the sample is of the first step of a pass; at the gradients' times too."""
        self._marks: Marks = []
        self._waits: list[tuple[Moment, Moment]] = []
        """Of the newest sample: from when until when this worker waited for gradients."""
        self._ordinary: dict[int, Marks] = {}
        """Samples of ordinary steps, by step."""
        self._odd: deque[tuple[int, Marks]] = deque(maxlen=_EARLY)
        """The newest few that were the first of a pass, or slowed by hooks; with their steps."""
        self._stride = self._seen = 1
        self._lap_from: tuple[Moment, int] | None = None
        """When the lap under way began, and after how many steps."""
        self._laps: deque[tuple[int, float, float, int, int, float]] = deque(maxlen=_LAPS)
        """As tuples, which cost an agreement less than objects do."""
        self._agreeing_from_s = self._waited_s = 0.0

    def begin_pass(self, step: int) -> None:
        """Note that a pass over the training data begins.

        Args:
            step: Its first one.
        """
        self._drop()
        self._pass_from_s, self._lap_from, self.next_sample = perf_counter(), None, step

    def timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Pass a pass's batches on; on a GPU the waits for them are taken."""
        return batches if self.batch_waits is None else self.batch_waits.timed(batches)

    def sample(self, step: int) -> None:
        """Close the sample of the step before, and begin another one if it is time. Local.

        Args:
            step: The one whose batch is asked for next.
        """
        self._end_sample()
        starts = self._pass_from_s is not None
        if not (starts or self.sampled < _EARLY or step == self._planned):
            self.next_sample = self._planned if self._planned > step else _NEVER
            return
        self.next_sample = step + 1
        self._step, self._is_first, self.is_sampling = step, starts, True
        self._is_hooked = not (starts and self.sampled) and _is_hooked(self.sampled)
        self.sampled += 1
        if self._is_hooked:
            self.gradients.watch(self._parameters().values())
        self._marks, self._waits = [("asked", now(on_gpu=self.on_gpu))], []

    def mark(self, happening: StepEvent) -> None:
        """Note that something has happened in the step that is sampled."""
        if happening == "piece" and self._marks[-1][0] != "backward":
            return  # the exchange of its gradients follows
        moment = now(on_gpu=self.on_gpu)
        if (self._marks[-1][0], happening) in _WAITS:
            self._waits.append((self._marks[-1][1], moment))
        self._marks.append((happening, moment))
        if happening == "batch" and self._pass_from_s is not None:
            self.loader_starts_s.append(perf_counter() - self._pass_from_s)
            self._pass_from_s = None

    def begin(self, loss: Tensor) -> None:
        """Note that a backward pass begins in which gradients are exchanged."""
        self._note.enter("gradients")
        if self.is_sampling:
            self.mark("backward")
            self.gradients.begin(self._marks[-1][1])
            if loss.requires_grad:
                loss.register_hook(self._in_backward)

    def end(self) -> None:
        """Note that the gradients are those of all workers."""
        self._note.leave()
        if self.is_sampling:
            self.mark("gradients")

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Tell waiting for the other workers from what a method computes of gradients itself."""
        if self.is_sampling:
            self.mark("sent")
        yield
        if self.is_sampling:
            self.mark("came")

    def close(self) -> float:
        """End the sample under way, since an exchange begins.

        Returns:
            How long this worker waited for gradients in the last step that was sampled.
        """
        self._end_sample()
        if self._waits:
            self._waited_s = seconds_within(self._waits)
            self._waits = []
        self._agreeing_from_s = perf_counter()
        return self._waited_s

    def count(self, steps: int, status: Status, step: int, planned: int) -> None:
        """Share the steps since the last exchange out into computing and waiting.

        Args:
            steps: How many these are.
            status: What this worker contributed to the exchange.
            step: The one that is next.
            planned: The step, from 0, that is to be sampled next.
        """
        self._note.count(steps, status.lap_s, status.data_s, status.waited_s * steps)
        self._planned = planned
        if planned < self.next_sample:
            self.next_sample = planned
        if self._lap_from is not None:
            now_s = perf_counter()
            self._end_lap(step, now_s, now_s - self._agreeing_from_s, steps, status.data_s)
            self._lap_from = now_s, step

    def laps(self) -> list[Lap]:
        """Give the newest laps."""
        # The first lap of a pass has all steps of the exchange but that with the first batch.
        return [
            Lap(steps=n, seconds=s, agreeing_s=a, until=end, data_s=data_s if n == waited else None)
            for n, s, a, end, waited, data_s in self._laps
        ]

    def samples(self) -> dict[int, StepSample]:
        """Give the samples by step; those at steps unlike others where there is none else."""
        seen = self._ordinary or dict(self._odd)
        return {step: _times_of(marks) for step, marks in seen.items()}

    def skip(self, step: int) -> None:
        """Leave out what has just been done besides the steps: a snapshot, an evaluation.

        Args:
            step: The one that is next, or under way.
        """
        self._drop()
        if self._lap_from is not None:
            self._lap_from = perf_counter(), step

    def reset(self, step: int) -> None:
        """Forget steps and laps, since those that come are others; gradients come as before.

        Args:
            step: The one that is next.
        """
        self.skip(step)
        self._laps.clear()
        self._odd.clear()
        self._ordinary, self._waits = {}, []
        self._stride = self._seen = self.sampled = 1
        self._waited_s, self.next_sample = 0.0, step

    def _end_lap(
        self, step: int, now_s: float, agreeing_s: float, waited: int = 0, data_s: float = 0.0
    ) -> None:
        """End a lap.

        Args:
            step: The one that is next.
            now_s: When it ends, by the host's clock.
            agreeing_s: What the exchange took.
            waited: How many steps `data_s` is of: maybe others besides the lap's.
            data_s: How long these waited for their batches.
        """
        if self._lap_from is not None and step > self._lap_from[1]:
            begun, before = self._lap_from
            if isinstance(begun, float):
                seconds = now_s - begun
            else:  # in the middle of the GPU's work, which is over now
                seconds = seconds_between(begun, now(on_gpu=True))
            self._laps.append((step - before, seconds, agreeing_s, step, waited, data_s))

    def _end_sample(self) -> None:
        if not self.is_sampling:
            return
        self.mark("closed")
        marks = self._marks
        if self._is_first:
            self._lap_from = marks[-1][1], self._step + 1  # when its work is done
        if any(what == "gradients" for what, _ in marks):
            self._keep(marks)
            if self._is_hooked:
                self.gradients.take(is_first=self.sampled == 1)
        if self.sampled == 1:
            self._waits = []  # it is spent on what happens once
        self._drop()

    def _drop(self) -> None:
        """Stop sampling the current step."""
        self.is_sampling, self._marks = False, []
        self.gradients.drop()

    def _keep(self, marks: Marks) -> None:
        """Remember a sample; of many ever fewer, so that they stay spread over the training."""
        if self._is_first or self._is_hooked:
            self._odd.append((self._step, marks))
            return
        if self._seen % self._stride == 0:
            self._ordinary[self._step] = marks
        self._seen += 1
        if len(self._ordinary) >= _KEPT:
            self._ordinary = dict(list(self._ordinary.items())[::2])
            self._stride *= 2

    def _in_backward(self, gradient: Tensor) -> None:
        # Called before that of DistributedDataParallel, which waits for the gradients.
        torch.autograd.Variable._execution_engine.queue_callback(self._note_computed)

    def _note_computed(self) -> None:
        moment = now(on_gpu=self.on_gpu)
        self.gradients.end(moment)
        if not self._alone and self.is_sampling:
            self._marks.append(("computed", moment))


def _times_of(marks: Marks) -> StepSample:
    first = marks[0][1]
    return share_out([(what, seconds_between(first, moment)) for what, moment in marks])


def _is_hooked(sampled: int) -> bool:
    """Tell whether a sample takes the gradients' times too: the hooks cost a little."""
    return sampled in (0, 2) or (sampled >= _EARLY - 1 and sampled % 4 == 0)
