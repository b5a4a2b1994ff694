"""Input and output of the detectors: a `Case` to explain, and a `Finding` with its cause."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cached_property
from typing import final

from paceline.options.figures import plural
from paceline.verify.causes import Cause
from paceline.verify.compare import Comparison, StepDifference
from paceline.verify.trace import Pass, Trace

_CLOSE = 1e-4
"""Weights within which figures are to be the same."""


@final
@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something found on one number of workers."""

    cause: Cause
    workers: int
    what: str
    step: int | None = None
    """The first step in which it shows, from 0."""
    rank: int | None = None
    tensor: str = ""
    lines: tuple[str, ...] = ()
    """Of the script, as `file:line`, the likeliest first."""
    remedy: str = ""
    """What to do in plain PyTorch, where it isn't what the cause says."""
    differs: bool = False
    """Whether it is there on one of the two numbers of workers alone."""

    @property
    def is_note(self) -> bool:
        """Whether it may be intended and makes no difference: then it is only reported."""
        return self.cause.is_note

    @property
    def makes_different(self) -> bool:
        """Whether the training isn't the same for it."""
        is_alike = self.cause.is_alike and not self.differs
        return not (self.is_note or is_alike)

    def mended_by(self, remedy: str) -> "Finding":
        """Give it with another remedy."""
        return replace(self, remedy=remedy)


@final
@dataclass(frozen=True, kw_only=True)
class Case:
    """One number of workers, to be explained."""

    first: Trace
    other: Trace
    comparison: Comparison
    beyond: StepDifference | None
    """The first step in which more than rounding stands between the two."""
    begins_at: int = 0
    """Steps that a resumed launch takes for done; in it they are those of the first launch."""
    begun_apart: float = 0.0
    """How far the weights that it begins with are from those, beyond rounding."""

    @property
    def workers(self) -> int:
        """How many there are in the launch that is to be explained."""
        return self.other.workers

    @property
    def first_workers(self) -> str:
        """How many there are in the first launch, in words."""
        return plural(self.first.workers, "worker")

    @property
    def traces(self) -> tuple[Trace, Trace]:
        """Both launches."""
        return self.first, self.other

    @property
    def ratio(self) -> float:
        """How many times as many workers there are as in the first launch."""
        return self.other.workers / self.first.workers

    @cached_property
    def weights_agree(self) -> bool:
        """Whether figures can be compared: weights that are far apart give others anyway."""
        return self.beyond is None and self.comparison.worst("weights") < _CLOSE

    def found(
        self,
        cause: Cause,
        what: str,
        *,
        step: int | None = None,
        rank: int | None = None,
        tensor: str = "",
        at: str = "",
    ) -> Finding:
        """Make a finding of this launch."""
        return Finding(
            cause=cause,
            workers=self.workers,
            what=what,
            step=step,
            rank=rank,
            tensor=tensor,
            lines=(at,) if at else (),
        )

    def found_beyond(self, cause: Cause, what: str) -> Finding:
        """Make a finding that shows in the first step with more than rounding between the two."""
        assert self.beyond is not None
        return self.found(cause, what, step=self.beyond.step, tensor=self.beyond.first_tensor)

    def whole_passes(self) -> tuple[Pass, Pass] | None:
        """Give the first epoch of both, where both were seen to their end."""
        mine, theirs = self.first.training(), self.other.training()
        if mine and theirs and mine[0].is_whole and theirs[0].is_whole:
            return mine[0], theirs[0]
        return None


class Need(Enum):
    """What a detector needs of a case."""

    RANKS = auto()
    """Several workers."""
    SAME_RANKS = auto()
    """As many workers as in the first launch."""
    STEPS = auto()
    """A step in both launches."""
    PLAIN = auto()
    """That a script trains by itself, not by a session."""
    BEYOND = auto()
    """A step with more than rounding between the two."""
    SAME_SAMPLES = auto()
    """That this step, or else every step, has the same samples."""


_MEETS: Mapping[Need, Callable[[Case], bool]] = {
    Need.RANKS: lambda case: case.workers > 1,
    Need.SAME_RANKS: lambda case: case.workers == case.first.workers,
    Need.STEPS: lambda case: bool(case.first.steps and case.other.steps),
    Need.PLAIN: lambda case: not case.other.in_session,
    Need.BEYOND: lambda case: case.beyond is not None,
    Need.SAME_SAMPLES: lambda case: (
        case.beyond.same_samples if case.beyond else case.comparison.samples_differ_from is None
    ),
}
"""By need, whether a case meets it."""


@final
@dataclass(frozen=True)
class Detector:
    """Looks for a cause, or for several of a kind."""

    find: Callable[[Case], Iterator[Finding]]
    needs: tuple[Need, ...] = ()

    def __call__(self, case: Case) -> list[Finding]:
        """Give what it finds; nothing where the case lacks what it needs."""
        return list(self.find(case)) if all(_MEETS[need](case) for need in self.needs) else []
