"""The timeline of a sampled step: events with times, and seconds by what they were spent on."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Literal, final

import torch

from paceline.data.batch import Batch

_KINDS = ("data", "forward", "backward", "wait", "optimizer", "other")
_ENDS: Mapping["StepEvent", str] = {
    "batch": "data",
    "backward": "forward",  # of a second model or the next piece too
    "sent": "other",
    "updated": "optimizer",
}
"""What happenings are the end of, whatever came before."""

Moment = float | torch.Event
"""By the host's clock, or in the order of a GPU's own work."""

StepEvent = Literal[
    "asked",
    "batch",
    "backward",
    "piece",
    "computed",
    "sent",
    "came",
    "gradients",
    "updated",
    "closed",
]
"""What is noted of a step.

asked: the next batch is asked for. batch: it is there. backward: a backward pass begins. piece: one
ends whose gradients stay here. computed: autograd has gone through its graph. sent: what a method
has computed of the gradients itself is on its way. came: it is there, of all workers. gradients:
they are those of all workers. updated: an optimizer's step is done. closed: the step is over.
"""


@dataclass(frozen=True, kw_only=True)
class StepSample:
    """What one worker spent a step on, in seconds; together they are the step."""

    data_s: float = 0.0
    """Waiting for the batch; of a GPU: idle, or copying and preparing it."""
    forward_s: float = 0.0
    """From the batch to a backward pass."""
    backward_s: float = 0.0
    """Autograd's own work."""
    wait_s: float = 0.0
    """From its end until the gradients were those of all workers, but for what is computed then."""
    optimizer_s: float = 0.0
    other_s: float = 0.0
    """What is left: what a method computes of gradients that autograd has made, counting."""

    @property
    def compute_s(self) -> float:
        """What this worker does without waiting for others."""
        return self.data_s + self.forward_s + self.backward_s + self.optimizer_s

    @property
    def total_s(self) -> float:
        """The whole step."""
        return self.compute_s + self.wait_s + self.other_s


def now(*, on_gpu: bool) -> Moment:
    """Note the moment; on a GPU in its stream, so that the host doesn't wait."""
    if not on_gpu:
        return perf_counter()
    event = torch.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begin: Moment, end: Moment) -> float:
    """Give the time between two moments of the same kind; on a GPU waits until both have passed."""
    return seconds_within([(begin, end)])


def seconds_within(spans: Sequence[tuple[Moment, Moment]]) -> float:
    """Add up the time between pairs of moments, in order; on a GPU waits for the last one alone."""
    if spans and isinstance(last := spans[-1][1], torch.Event):
        last.synchronize()
    return sum(_elapsed_s(begin, end) for begin, end in spans)


def _elapsed_s(begin: Moment, end: Moment) -> float:
    if isinstance(begin, float) and isinstance(end, float):
        return end - begin
    assert isinstance(begin, torch.Event)
    assert isinstance(end, torch.Event)
    return begin.elapsed_time(end) / 1000


@final
class BatchWaits:
    """How long a GPU has waited for its batches: idle, or copying and preparing them.

    The host may wait for a batch while the GPU still computes the steps before: that time is none
    of the GPU's. Each wait is two events in its stream, which are read at an exchange.
    """

    def __init__(self) -> None:
        self._spans: list[tuple[Moment, Moment]] = []

    def timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Pass batches on, and note since when each was awaited."""
        while True:
            requested = now(on_gpu=True)
            batch = next(batches, None)
            if batch is None:
                return
            self._spans.append((requested, now(on_gpu=True)))
            yield batch

    def take_s(self) -> float:
        """Give the seconds since the last call; waits until the GPU has all these batches."""
        spans, self._spans = self._spans, []
        return seconds_within(spans)


def share_out(marks: Sequence[tuple[StepEvent, float]]) -> StepSample:
    """Tell what the time between a step's marks was spent on. Pure.

    Args:
        marks: What happened, and when, in seconds; in the order in which it did.
    """
    spent = dict.fromkeys(_KINDS, 0.0)
    for (before, begun_s), (after, ended_s) in pairwise(marks):
        spent[_spent_on(before, after)] += ended_s - begun_s
    return StepSample(
        data_s=spent["data"],
        forward_s=spent["forward"],
        backward_s=spent["backward"],
        wait_s=spent["wait"],
        optimizer_s=spent["optimizer"],
        other_s=spent["other"],
    )


def _spent_on(before: StepEvent, after: StepEvent) -> str:
    if after in _ENDS:
        return _ENDS[after]
    if (before, after) == ("came", "gradients"):
        return "other"
    if before == "backward" or (before, after) == ("piece", "gradients"):
        return "backward"
    if before in ("computed", "sent"):
        return "wait"
    return "other"
