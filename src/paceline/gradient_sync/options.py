"""What a user may say about how the workers' gradients become one. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from paceline.errors import UsageError
from paceline.options.fields import LARGEST_NUMBER, OptionValue

SyncMethod = Literal["allreduce", "ordered", "bf16", "fp16", "powersgd", "local", "diloco", "auto"]
SyncPrecision = Literal["fp32", "bf16", "int8"]

LOCAL_METHODS = ("local", "diloco")
"""Methods that average weights every few steps instead of gradients in each."""
POWERSGD_BUCKETS = 4
"""Into as many PowerSGD cuts a model's gradients at most: what all but the last one take hides
behind the backward pass, and each costs two rounds of small messages."""

_LOCAL = ("sync_warmup_steps", "sync_every", "sync_delay", "sync_parts", "sync_precision")
OWN_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "powersgd": ("sync_warmup_steps", "powersgd_rank"),
    "local": _LOCAL,
    "diloco": (*_LOCAL, "outer_lr", "outer_momentum"),
}
"""Options that only some methods have, by method."""


@dataclass(frozen=True, kw_only=True)
class SyncOptions:
    """How the workers' gradients become one."""

    sync: SyncMethod | None = None
    """How gradients become one. allreduce: averaged in full in every step. ordered: summed in a
    fixed order, the same bits on any number of workers (needs --shards). bf16, fp16: half the
    bytes, rounded. powersgd: two thin matrices instead of each large one, a hundredth of the bytes,
    an approximation. local: each worker trains on its own, and weights are averaged every
    --sync-every steps. diloco: the same, with momentum over the averages. auto: measures the first
    steps and chooses. Default: allreduce; ordered with --shards."""

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
        for name in ("powersgd_rank", "sync_every", "sync_parts"):
            _at_least(1, name, getattr(self, name))
        _at_least(0, "sync_warmup_steps", self.sync_warmup_steps)
        _at_least(0, "sync_delay", self.sync_delay)
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


def _at_least(least: int, name: str, value: int | None) -> None:
    if value is not None and value < least:
        raise UsageError(f"--{name.replace('_', '-')} must be at least {least}, not {value}")


def without_other_methods(
    settings: Mapping[str, OptionValue], given: Mapping[str, OptionValue]
) -> dict[str, OptionValue]:
    """Leave out of settings what belongs to another method than the one newly given. Pure."""
    if given.get("sync") is None:
        return dict(settings)
    own = OWN_OPTIONS.get(str(given["sync"]), ())
    others = {name for names in OWN_OPTIONS.values() for name in names} - {*own}
    return {name: value for name, value in settings.items() if name not in others}
