"""Step times, by which `--sync auto`, `--compile auto` and `--cuda-graphs auto` choose."""

from statistics import median
from time import perf_counter
from typing import final

import torch

from paceline.distributed.device import is_accelerator
from paceline.launch.heartbeat import DEVICE_WAIT, note
from paceline.options.figures import show_time

_MIN_GAIN = 0.03


@final
class StepTimes:
    """The lengths of steps that follow each other, of one way to train. Local to the worker."""

    def __init__(self, device: torch.device, warm_up: int = 0) -> None:
        """Args:
        device: On which the steps are computed: a step is over when it has nothing left to do.
        warm_up: Steps that aren't measured, of a start or of another way.
        """
        self._device, self._warm_up = device, warm_up
        self._times_s: list[float] = []
        self._since_s: float | None = None
        self.left_out = 0
        """Steps since the start, or since the way changed, that weren't measured."""

    def __len__(self) -> int:
        return len(self._times_s)

    @property
    def median_s(self) -> float:
        """Seconds of the step in the middle."""
        return median(self._times_s)

    @property
    def total_s(self) -> float:
        """Seconds of all steps measured."""
        return sum(self._times_s)

    @property
    def is_due(self) -> bool:
        """Whether the times are to be compared: seldom, after 4, 8, 16 … steps."""
        steps = len(self._times_s)
        return steps >= 4 and not steps & (steps - 1)

    def take(self, *, is_warm: bool = True) -> None:
        """A step is over: take the time since the last one, or since `begin`. Waits for the device.

        Args:
            is_warm: Whether steps of this way can be measured by now.
        """
        since_s = self._since_s
        self.begin()
        if not is_warm or self.left_out < self._warm_up:
            self.left_out += 1
        elif since_s is not None and self._since_s is not None:
            self._times_s.append(self._since_s - since_s)

    def begin(self) -> None:
        """A step begins, where none came right before it. Waits for the device."""
        if is_accelerator(self._device):
            operation, note.operation = note.operation, DEVICE_WAIT
            torch.accelerator.synchronize()
            note.operation = operation
        self._since_s = perf_counter()

    def pause(self) -> None:
        """What comes next is no step: an evaluation."""
        self._since_s = None

    def restart(self) -> None:
        """The next steps go another way."""
        self._times_s, self.left_out, self._since_s = [], 0, None


def compare(step_s: float, plain_s: float, *, now: str, plain: str) -> tuple[bool, str]:
    """Tell whether steps that go another way are enough faster to stay with it, and why. Pure.

    Args:
        step_s: A step that goes this way.
        plain_s: A step as it is otherwise.
        now: What the one is called, such as `compiled`.
    """
    is_faster = step_s < (1 - _MIN_GAIN) * plain_s
    return is_faster, f"a step takes {show_time(step_s)} {now}, {show_time(plain_s)} {plain}"
