"""Input and output of the detectors: a `Case` to explain, and a `Finding` with its cause."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import final

from paceline.verify.compare import Comparison, StepDifference
from paceline.verify.trace import Pass, Step, Trace


class Cause(StrEnum):
    """Why a training isn't the same on another number of workers, or once it is resumed."""

    NO_COMMUNICATION = "no-communication"
    NO_SAMPLER = "no-sampler"
    SET_EPOCH = "set-epoch"
    DROP_LAST = "drop-last"
    PADDED_TRAINING = "padded-training"
    PADDED_EVALUATION = "padded-evaluation"
    DROPPED_EVALUATION = "dropped-evaluation"
    SHARES_OVERLAP = "shares-overlap"
    OTHER_SAMPLES = "other-samples"
    OTHER_VALUES = "other-values"
    BATCH_GROWS = "batch-grows"
    RATE_STAYS = "rate-stays"
    RATE_DIFFERS = "rate-differs"
    RATE_APART = "rate-apart"
    SCHEDULE_PER_WORKER = "schedule-per-worker"
    GRADIENT_FACTOR = "gradient-factor"
    MEAN_OF_MEANS = "mean-of-means"
    WEIGHED_ALIKE = "weighed-alike"
    ACROSS_SAMPLES = "across-samples"
    CLIPPED_EARLY = "clipped-early"
    BATCHNORM_SHARE = "batchnorm-share"
    SAME_DROPOUT = "same-dropout"
    SAME_AUGMENTATION = "same-augmentation"
    SAME_NOISE = "same-noise"
    BUFFERS_APART = "buffers-apart"
    MODES_APART = "modes-apart"
    START_APART = "start-apart"
    START_HIDDEN = "start-hidden"
    OTHER_START = "other-start"
    MODELS_DIFFER = "models-differ"
    WRAPPER_BYPASSED = "wrapper-bypassed"
    NO_SYNC = "no-sync"
    SCALE_APART = "scale-apart"
    LATE_PARAMETER = "late-parameter"
    WEIGHTS_APART = "weights-apart"
    UNEQUAL_STEPS = "unequal-steps"
    WAITS_APART = "waits-apart"
    NO_GRADIENT = "no-gradient"
    METRIC_FACTOR = "metric-factor"
    METRIC_MEANS = "metric-means"
    METRIC_APART = "metric-apart"
    METRIC_SHARE = "metric-share"
    FIGURES = "figures"
    NOT_REPEATABLE = "not-repeatable"
    NOT_RESUMED = "not-resumed"
    WEIGHTS_NOT_RESTORED = "weights-not-restored"
    ORDER_NOT_RESTORED = "order-not-restored"
    RANDOM_NOT_RESTORED = "random-not-restored"
    OPTIMIZER_NOT_RESTORED = "optimizer-not-restored"
    SCHEDULE_NOT_RESTORED = "schedule-not-restored"
    SCALE_NOT_RESTORED = "scale-not-restored"
    BUFFERS_NOT_RESTORED = "buffers-not-restored"
    CHANCE = "chance"
    UNKNOWN = "unknown"
    NEEDS_GPU = "needs-gpu"
    FAILED = "failed"


NOTES = frozenset(
    {Cause.BATCH_GROWS, Cause.START_HIDDEN, Cause.NO_GRADIENT, Cause.METRIC_SHARE, Cause.CHANCE}
)
"""Causes that may be intended: reported, but no faults by themselves."""
ALIKE = NOTES - {Cause.BATCH_GROWS} | {Cause.SET_EPOCH}
"""What is the same on any number of workers, or changes no weights."""


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

    @property
    def is_fault(self) -> bool:
        """Whether it is a fault; else it may be intended."""
        return self.cause not in NOTES

    @property
    def makes_different(self) -> bool:
        """Whether the training isn't the same for it."""
        return self.cause not in ALIKE


@final
@dataclass(frozen=True, kw_only=True)
class Case:
    """One number of workers, to be explained."""

    first: Trace
    other: Trace
    comparison: Comparison
    beyond: StepDifference | None
    """The first step in which more than rounding stands between the two."""

    @property
    def workers(self) -> int:
        """How many there are in the launch that is to be explained."""
        return self.other.workers

    def found_beyond(self, cause: Cause, what: str) -> Finding:
        """Make a finding that shows in the first step with more than rounding between the two."""
        assert self.beyond is not None
        return self.found(cause, what, step=self.beyond.step, tensor=self.beyond.first_tensor)

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

    def first_steps(self) -> tuple[Step, Step] | None:
        """Give the first step of both, where both have one."""
        if not self.first.steps or not self.other.steps:
            return None
        return self.first.steps[0], self.other.steps[0]

    def whole_passes(self) -> tuple[Pass, Pass] | None:
        """Give the first epoch of both, where both were seen to their end."""
        mine, theirs = self.first.training(), self.other.training()
        if mine and theirs and mine[0].is_whole and theirs[0].is_whole:
            return mine[0], theirs[0]
        return None


Detector = Callable[[Case], Iterator[Finding]]
"""Looks for one cause."""
