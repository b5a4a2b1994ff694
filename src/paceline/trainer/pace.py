"""Where this worker's time goes: told apart by looking closely at one step in each half second."""

from time import perf_counter
from typing import final

import torch
from torch import Tensor

from paceline.launch.note import StepNote
from paceline.trainer.agreement import Status


@final
class Pace:
    """Measures how long this worker waits for the others at the end of a backward pass.

    What it computes itself ends when autograd has gone through its graph; what is left of the
    backward pass then is the wait for gradients. On a GPU events are recorded in the stream, so
    that the host doesn't wait; they are read at an exchange, when they have long passed.
    """

    def __init__(self, note: StepNote, device: torch.device, world_size: int) -> None:
        """Args:
        note: Where the result goes, and that a backward pass's collective is under way.
        device: Of this worker.
        world_size: Number of workers; a single one waits for nobody.
        """
        self._note = note
        self._on_gpu = device.type == "cuda"
        self._alone = world_size == 1
        self._sampled_step = -1
        self._is_due = False
        """Whether the step under way is the one that is looked at."""
        self._computed_s: float | None = None
        self._computed: torch.cuda.Event | None = None
        self._passes: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._sampled_s = 0.0
        self._waited_s = 0.0
        """In the last step that was looked at."""

    def step(self, step: int) -> None:
        """Begin a step.

        Args:
            step: Its number, from 0.
        """
        self._note.begin(step + 1)
        self._is_due = step == self._sampled_step

    def begin(self, loss: Tensor) -> None:
        """Note that a backward pass begins in which gradients are exchanged."""
        self._note.enter("gradients")
        if self._is_due and loss.requires_grad:
            self._computed_s = self._computed = None
            loss.register_hook(self._in_backward)

    def end(self) -> None:
        """Note that the gradients are those of all workers."""
        self._note.leave()
        if self._is_due:
            self._take_time()

    def count(self, steps: int, status: Status, next_step: int) -> None:
        """Share the steps since the last exchange out into computing and waiting.

        Args:
            steps: How many.
            status: What this worker told of them.
            next_step: The step, from 0, that is to be looked at next.
        """
        if self._is_due:
            self._take_sample()
        self._note.count(steps, status.lap_s, status.data_s, self._waited_s * steps)
        if not self._alone:
            self._sampled_step = next_step

    def _take_sample(self) -> None:
        passes, self._passes = self._passes, []
        if passes and passes[-1][1].query():
            self._sampled_s = sum(begin.elapsed_time(end) for begin, end in passes) / 1000
        self._waited_s, self._sampled_s = self._sampled_s, 0.0

    def _in_backward(self, gradient: Tensor) -> None:
        # Called before that of DistributedDataParallel, which waits for the gradients.
        torch.autograd.Variable._execution_engine.queue_callback(self._note_computed)

    def _note_computed(self) -> None:
        self._computed_s = perf_counter()
        if self._on_gpu:
            self._computed = torch.cuda.Event(enable_timing=True)
            self._computed.record()

    def _take_time(self) -> None:
        if self._computed is not None:
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            self._passes.append((self._computed, end))
        elif self._computed_s is not None:
            self._sampled_s += perf_counter() - self._computed_s
        self._computed_s = self._computed = None
