"""Measures when each gradient of a backward pass is ready."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from math import ceil
from statistics import median
from typing import final

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.results.profile import Arrival
from paceline.training.profiling.step_timeline import Moment, now, seconds_between

_KEPT = 9
"""Steps that are remembered."""
_MAX_ARRIVALS = 256


@final
class _Sample:
    """When the gradients of one step were ready; GPU events are read lazily."""

    def __init__(
        self,
        arrivals: Mapping[nn.Parameter, tuple[int, Moment]],
        passes: Sequence[Sequence[Moment]],
    ) -> None:
        """Create the sample.

        Args:
            arrivals: When, and in which pass.
            passes: Begin and end of each backward pass.
        """
        self._arrivals, self._passes = arrivals, passes
        self._shares: Mapping[nn.Parameter, float] | None = None

    def shares(self) -> Mapping[nn.Parameter, float]:
        """Give the shares of the backward pass: they vary less than its time."""
        if self._shares is None:
            before_s = [0.0, *accumulate(seconds_between(*passed) for passed in self._passes)]
            self._shares = {
                parameter: (before_s[number] + seconds_between(self._passes[number][0], moment))
                / (before_s[-1] or 1.0)
                for parameter, (number, moment) in self._arrivals.items()
            }
            self._arrivals, self._passes = {}, []
        return self._shares


@final
class GradientTimes:
    """Watches single steps for when each parameter's gradient is there. Local to a worker.

    Of a step with several backward passes whose gradients are exchanged (two models that are
    trained by turns) the passes are put one after another.
    """

    def __init__(self, *, on_gpu: bool) -> None:
        """Create the gradient times.

        Args:
            on_gpu: Whether gradients come from a GPU, whose own clock then counts.
        """
        self._on_gpu = on_gpu
        self._hooks: list[RemovableHandle] = []
        self._passes: list[list[Moment]] = []
        """Begin and, once it has come, end of each backward pass of the step."""
        self._is_open = False
        """Whether a backward pass is under way."""
        self._arrivals: dict[nn.Parameter, tuple[int, Moment]] = {}
        self._samples: list[_Sample] = []
        self._only_first = False

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Watch the step that begins."""
        self._passes, self._arrivals, self._is_open = [], {}, False
        self._hooks = [
            p.register_post_accumulate_grad_hook(partial(self._arrive, p))
            for p in parameters
            if p.requires_grad
        ]

    def begin(self, moment: Moment) -> None:
        """Note that a backward pass begins."""
        if self._hooks:
            self._passes.append([moment])
            self._is_open = True

    def end(self, moment: Moment) -> None:
        """Note that autograd is through, for the first time since `begin`."""
        if self._is_open:
            self._passes[-1].append(moment)
            self._is_open = False

    def drop(self) -> None:
        """Stop watching; what has come in this step is forgotten."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._arrivals = [], {}

    def take(self, *, is_first: bool) -> None:
        """Stop watching, and remember the step.

        Args:
            is_first: It was the first step, which is like no other: it counts until there is
                another.
        """
        arrivals, passes = self._arrivals, self._passes
        self.drop()
        if not arrivals or any(len(each) < 2 for each in passes):
            return
        earlier = [] if self._only_first else self._samples
        self._samples, self._only_first = [*earlier, _Sample(arrivals, passes)][-_KEPT:], is_first

    def arrivals(self, backward_s: float) -> tuple[Arrival, ...]:
        """Give the usual times, in order, of at most 256 groups; waits until they have passed."""
        times: dict[nn.Parameter, list[float]] = {}
        for sample in self._samples:
            for parameter, at in sample.shares().items():
                times.setdefault(parameter, []).append(at)
        usual = [
            Arrival(at_s=median(all_at) * backward_s, bytes=p.nbytes) for p, all_at in times.items()
        ]
        return merged(sorted(usual, key=lambda arrival: arrival.at_s))

    def _arrive(self, parameter: nn.Parameter, _: Tensor) -> None:
        if self._is_open and parameter not in self._arrivals:
            self._arrivals[parameter] = len(self._passes) - 1, now(on_gpu=self._on_gpu)


def merged(arrivals: Sequence[Arrival], most: int = _MAX_ARRIVALS) -> tuple[Arrival, ...]:
    """Put neighbours together, so that there are at most so many. Pure.

    Args:
        arrivals: In order of time.
    """
    size = max(1, ceil(len(arrivals) / most))
    groups = (arrivals[i : i + size] for i in range(0, len(arrivals), size))
    return tuple(Arrival(at_s=g[-1].at_s, bytes=sum(a.bytes for a in g)) for g in groups)
