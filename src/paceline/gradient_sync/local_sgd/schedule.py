"""Schedule of local SGD: at which steps each part of a model is averaged. Pure; no torch."""

from dataclasses import dataclass
from typing import Self, final

from paceline.gradient_sync.options import SyncOptions, SyncPrecision


@final
@dataclass(frozen=True, kw_only=True)
class LocalPlan:
    """When parts of a model leave and arrive, counted in local steps: from 1 in every round of
    steps that began with the same weights on all workers.

    A part leaves every `every` steps, and what became of it is taken over `delay` steps later,
    never before: what is computed depends on the step alone, not on how fast the network was.
    """

    every: int
    """Local steps between two averages of a part."""
    delay: int
    """Steps that go on while a part is under way; below `every`, 0 waits for it."""
    parts: int
    """How many parts the model is cut into; their steps are spread evenly over `every`."""

    def leaving(self, step: int) -> tuple[int, ...]:
        """List the parts that leave after a local step, in the order in which they do."""
        if step < 1:
            return ()
        return tuple(p for p in range(self.parts) if (step - self._offset(p)) % self.every == 0)

    def arriving(self, step: int) -> tuple[int, ...]:
        """List the parts whose average is taken over after a local step, in the same order."""
        return self.leaving(step - self.delay)

    def _offset(self, part: int) -> int:
        return (part + 1) * self.every // self.parts


@final
@dataclass(frozen=True, kw_only=True)
class LocalTerms:
    """Hyperparameters of local SGD: schedule, outer optimizer and precision."""

    plan: LocalPlan
    precision: SyncPrecision
    """What differences of weights are sent in; fp32 means that nothing is rounded."""
    outer_lr: float
    """Share of the averaged difference that is taken over."""
    outer_momentum: float
    """Nesterov momentum over the averaged differences."""

    @classmethod
    def of(cls, options: SyncOptions) -> Self:
        """Take them from the options; `local` takes averages over as they are."""
        plain = options.sync != "diloco"
        plan = LocalPlan(every=options.sync_every, delay=options.delay, parts=options.sync_parts)
        return cls(
            plan=plan,
            precision=options.sync_precision,
            outer_lr=1.0 if plain else options.outer_lr,
            outer_momentum=0.0 if plain else options.outer_momentum,
        )

    @property
    def is_plain(self) -> bool:
        """Whether the averages are taken over as they are."""
        return self.outer_lr == 1 and self.outer_momentum == 0

    def describe(self) -> dict[str, object]:
        """Say by what a worker's own state depends on them: JSON."""
        plan = self.plan
        return {
            "every": plan.every,
            "delay": plan.delay,
            "parts": plan.parts,
            "precision": self.precision,
        }
