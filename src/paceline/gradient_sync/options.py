"""Options of gradient synchronisation. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from paceline.errors import UsageError
from paceline.gradient_sync.registry import describe_choices, sync_methods
from paceline.options.fields import LARGEST_NUMBER, OptionValue, check_at_least

if TYPE_CHECKING:
    SyncMethod = str  # a checker can't know which packages are installed
else:
    SyncMethod = Literal[tuple(sync_methods())]
SyncPrecision = Literal["fp32", "bf16", "int8"]

LOCAL_METHODS = tuple(name for name, entry in sync_methods().items() if entry.own_weights)
"""Methods that average weights every few steps instead of gradients in each."""
POWERSGD_BUCKETS = 4
"""Into as many PowerSGD cuts a model's gradients at most: what all but the last one take hides
behind the backward pass, and each costs two rounds of small messages."""

OWN_OPTIONS: Mapping[str, tuple[str, ...]] = {
    name: entry.options for name, entry in sync_methods().items() if entry.options
}
"""Options that only some methods have, by method."""


@dataclass(frozen=True, kw_only=True)
class SyncOptions:
    """How the workers' gradients are combined."""

    sync: SyncMethod | None = field(default=None, metadata={"help": describe_choices()})
    """How the workers' gradients are combined. Default: allreduce; ordered with --shards."""

    sync_warmup_steps: int | None = None
    """With powersgd, local and diloco: average gradients in full for this many steps first.
    Default: the steps of the first epoch."""

    powersgd_rank: int = 4
    """Columns of PowerSGD's two matrices: more are closer to the true gradient, and more bytes."""

    sync_every: int = 8
    """With local and diloco: steps that each worker takes on its own between two averages."""

    sync_delay: int | None = None
    """With local and diloco: steps that go on while an average is under way, so that it hides
    behind them; 0 waits for it. Default: half of --sync-every."""

    sync_parts: int = 1
    """With local and diloco: cut the model into this many parts, each averaged at a step of its
    own, so that the network is busy evenly."""

    sync_precision: SyncPrecision = "fp32"
    """With local and diloco: what differences of weights are sent in; bf16 takes half the bytes,
    int8 a quarter."""

    outer_lr: float = 0.7
    """With diloco: share of the averaged difference that is taken over."""

    outer_momentum: float = 0.9
    """With diloco: Nesterov momentum over the averaged differences."""

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            UsageError: A value is out of range; the message says which.
        """
        check_at_least(self, powersgd_rank=1, sync_every=1, sync_parts=1)
        check_at_least(self, sync_warmup_steps=0, sync_delay=0)
        if self.sync_delay is not None and self.sync_delay >= self.sync_every:
            raise UsageError(
                f"--sync-delay {self.sync_delay} must be below --sync-every {self.sync_every}: an "
                "average has to arrive before the next one begins"
            )
        if not 0 < self.outer_lr <= LARGEST_NUMBER:
            raise UsageError(
                f"--outer-lr must be above 0, at most {LARGEST_NUMBER:g}, not {self.outer_lr}"
            )
        if not 0 <= self.outer_momentum < 1:
            raise UsageError(
                f"--outer-momentum must be at least 0 and below 1, not {self.outer_momentum}"
            )

    @property
    def delay(self) -> int:
        """Steps that an average may take without holding up the training."""
        return self.sync_every // 2 if self.sync_delay is None else self.sync_delay


def without_other_methods(
    settings: Mapping[str, OptionValue], given: Mapping[str, OptionValue]
) -> dict[str, OptionValue]:
    """Leave out of settings what belongs to another method than the one newly given. Pure."""
    if given.get("sync") is None:
        return dict(settings)
    own = OWN_OPTIONS.get(str(given["sync"]), ())
    others = {name for names in OWN_OPTIONS.values() for name in names} - {*own}
    return {name: value for name, value in settings.items() if name not in others}
