"""Options of gradient synchronisation. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from paceline.gradient_sync.registry import describe_choices, sync_methods
from paceline.options.fields import OptionValue, check_at_least

if TYPE_CHECKING:
    SyncMethod = str  # a checker can't know which packages are installed
else:
    SyncMethod = Literal[tuple(sync_methods())]
SyncPrecision = Literal["fp32", "bf16"]

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

    sync_precision: SyncPrecision = "fp32"
    """With allreduce: what gradients travel in. fp32: as they are. bf16: half the bytes, rounded to
    8 bits of fraction."""

    sync_warmup_steps: int | None = None
    """With powersgd: average gradients in full for this many steps first. Default: the steps of the
    first epoch."""

    powersgd_rank: int = 4
    """Columns of PowerSGD's two matrices: more are closer to the true gradient, and more bytes."""

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            UsageError: A value is out of range; the message says which.
        """
        check_at_least(self, powersgd_rank=1, sync_warmup_steps=0)


def without_other_methods(
    settings: Mapping[str, OptionValue], given: Mapping[str, OptionValue]
) -> dict[str, OptionValue]:
    """Leave out of settings what belongs to another method than the one newly given. Pure."""
    if given.get("sync") is None:
        return dict(settings)
    own = OWN_OPTIONS.get(str(given["sync"]), ())
    others = {name for names in OWN_OPTIONS.values() for name in names} - {*own}
    return {name: value for name, value in settings.items() if name not in others}
