"""Events and launches made by hand."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from weakref import ref

import torch

from paceline.verify.events import Backward, Drawn, Event, PassBegun, PassEnded, Printed, Stepped
from paceline.verify.observing.passes import Pass, Passes
from paceline.verify.tensor_sketch import mark
from paceline.verify.trace import Trace


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
        loader=loader,
        number=number,
        sampler=sampler,
        replicas=replicas,
        shuffles=True,
        sampler_drops=False,
        loader_drops=False,
        epoch=0,
        samples=samples,
        seed=seed,
        subset=subset,
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
    return trace_of([events])


def trace_of(ranks: Sequence[Sequence[Event]], failure: str = "") -> Trace:
    """Make a launch of each rank's events; which batches a backward pass follows is filled in."""
    return Trace(ranks=tuple(tuple(_fed(events)) for events in ranks), failure=failure)


def _fed(events: Sequence[Event]) -> Iterator[Event]:
    passes, own = Passes(most_steps=1000, most_epochs=1000), dict[tuple[int, int], Pass]()
    for event in events:
        if isinstance(event, PassBegun | Drawn | PassEnded):
            key = event.loader, event.number
            if key not in own:
                for (loader, _), before in own.items():
                    if loader == event.loader:  # its iterator is gone
                        before.iterator = ref(_Gone())
                own[key] = passes.begin(event.loader)
                own[key].number = event.number
            if isinstance(event, Drawn):
                passes.draw(own[key])
            elif isinstance(event, PassEnded):
                passes.end(own[key])
        elif isinstance(event, Backward):
            event = replace(event, fed=passes.backward())
        yield event


class _Gone:
    """Not referred to by anything."""
