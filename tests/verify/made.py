"""Events and launches made by hand."""

from collections.abc import Sequence

import torch

from paceline.verify.events import Backward, Drawn, Event, PassBegun, PassEnded, Printed, Stepped
from paceline.verify.tensor_sketch import mark
from paceline.verify.trace import Trace, collect_trace


def tensor_of(value: float) -> torch.Tensor:
    """Give (8,) of one value."""
    return torch.full((8,), value)


def stepped(gradient: float, weight: float = 1.0, *, rate: float = 0.1) -> Stepped:
    """Make the step of an optimizer with one parameter."""
    return Stepped(
        optimizer=0,
        names=("w",),
        before=(),
        gradients=(mark(tensor_of(gradient), whole=True),),
        weights=(mark(tensor_of(weight), whole=True),),
        buffers={},
        rates=(rate,),
        scheduled=0,
    )


def begun(
    loader: int,
    number: int,
    *,
    samples: int = 8,
    replicas: int = 1,
    seed: int = 0,
    subset: str = "",
) -> PassBegun:
    """Begin a pass over a loader."""
    sampler = "DistributedSampler" if replicas > 1 else "RandomSampler"
    return PassBegun(
        loader, number, sampler, replicas, True, False, False, 0, samples, 0, seed, subset
    )


def trained(
    samples: Sequence[str], loss: float, gradient: float, weight: float = 1.0
) -> list[Event]:
    """Make the events of a step."""
    drawn = Drawn(0, 0, tuple(samples), ())
    return [drawn, Backward(loss), stepped(gradient, weight)]


def launch(steps: Sequence[Sequence[Event]], *lines: str) -> Trace:
    """Make a launch of one worker whose epoch has these steps, and which prints."""
    events: list[Event] = [begun(0, 0), *(e for step in steps for e in step)]
    events += [PassEnded(0, 0, False), *map(Printed, lines)]
    return collect_trace([events])
