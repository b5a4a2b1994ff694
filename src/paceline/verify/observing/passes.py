"""Which passes over loaders train, and when enough of them was seen."""

import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import final

from paceline.verify.trial import EnoughSeenError

Key = tuple[int, int]
"""Of a pass: its loader, and its number among that loader's passes."""
_MAX_EVALUATED = 200
"""Batches of a pass without training."""


@final
@dataclass(eq=False)
class Pass:
    """One pass over a loader."""

    loader: int
    """Where the loader was made: the same on all ranks, and for one made anew in every epoch."""
    number: int
    drawn: int = 0
    waiting: int = 0
    """Batches since the last backward pass, apart from those that were only evaluated."""
    is_evaluated: bool = False
    """Whether a model was called without gradients since the newest batch, and none with them."""
    trained: int = 0
    """Batches that came before a backward pass."""
    steps: int = 0
    is_over: bool = False
    iterator: weakref.ref[object] | None = None

    @property
    def is_open(self) -> bool:
        """Whether more batches may come: its loop wasn't left by a `break` either."""
        return not self.is_over and (self.iterator is None or self.iterator() is not None)

    @property
    def trains(self) -> bool:
        """Whether most of its batches were trained on."""
        return 2 * self.trained > self.drawn


@final
@dataclass
class Passes:
    """Counts steps and epochs of each loader; only passes that train count.

    A batch is trained on if a backward pass comes before its pass ends. Scripts that validate
    within an epoch have other passes begun, and left, while the training's is open.
    """

    most_steps: int
    """Steps after which a pass is cut off."""
    most_epochs: int
    _passes: Counter[int] = field(default_factory=Counter)
    """How many passes have begun over each loader."""
    _epochs: Counter[int] = field(default_factory=Counter)
    """How many of them trained and are done."""
    _open: list[Pass] = field(default_factory=list)
    _training: dict[int, Pass] = field(default_factory=dict)
    """The newest pass of each loader that is trained on, until it is counted."""
    _stepping: set[Pass] = field(default_factory=set)
    """Those trained on since the last step."""
    _late: list[Pass] = field(default_factory=list)
    """The newest pass, if it ended with the only batches that it had still to be used."""

    def begin(self, loader: int) -> Pass:
        """Begin a pass."""
        begun = Pass(loader, self._passes[loader])
        self._open = [own for own in self._open if own.is_open]
        self._passes[loader] += 1
        self._open.append(begun)
        return begun

    def draw(self, own: Pass) -> None:
        """Count a batch."""
        # What was evaluated before the next batch came, of any loader, isn't trained on.
        for other in self._open:
            if other.is_evaluated:
                other.waiting, other.is_evaluated = 0, False
        self._late.clear()
        own.drawn += 1
        own.waiting += 1

    def forward(self, *, with_gradients: bool) -> None:
        """Note that a whole model is called."""
        for own in self._open:
            own.is_evaluated = own.waiting > 0 and not with_gradients

    def backward(self) -> tuple[Key, ...]:
        """Return the passes whose batches a backward pass, or a step without one, may use.

        Raises:
            EnoughSeenError: All of them have been trained on for enough epochs.
        """
        fed = [own for own in self._open if own.is_open and own.waiting]
        used, self._late = fed or self._late, []
        # A loader's next training pass ends the one before, which was left by a `break`.
        for own in used:
            before = self._training.get(own.loader, own)
            if before is not own and before not in used:
                self._count(before)
        if used and all(self._epochs[own.loader] >= self.most_epochs for own in used):
            raise EnoughSeenError
        for own in used:
            own.trained += own.waiting
            own.waiting, own.is_evaluated = 0, False
            self._training[own.loader] = own
            if own.is_over:
                self._count(own)
        self._stepping.update(fed)
        return tuple((own.loader, own.number) for own in used)

    def step(self) -> None:
        """Count a step of the optimizer that takes most."""
        for own in self._stepping:
            own.steps += 1
        self._stepping.clear()

    def end(self, own: Pass) -> None:
        """End a pass."""
        own.is_over = True
        if own.trains:
            self._count(own)
        elif own.waiting and not own.is_evaluated:  # a loader that looks ahead has but one batch
            self._late = [own]

    def _count(self, done: Pass) -> None:
        if self._training.get(done.loader) is done:
            del self._training[done.loader]
            self._epochs[done.loader] += 1

    def is_long(self, own: Pass) -> bool:
        """Return whether enough of a pass was seen."""
        evaluated = 0 if own.trained else own.drawn
        return own.steps >= self.most_steps or evaluated >= max(_MAX_EVALUATED, self.most_steps)
