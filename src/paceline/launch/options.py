"""Options of launching: how many workers, with how many threads, restarted how often."""

from dataclasses import dataclass
from typing import Literal

from paceline.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Where and how often the worker processes are started."""

    workers: int | None = None
    """Worker processes to start. Default: one per GPU, or 2 on a machine without (never more than
    its cores). More CPU workers than cores can be asked for; they share the cores."""

    threads: int | None = None
    """CPU threads per worker. Default: the cores shared out evenly, at least 1; with --shards 1, so
    that the bits don't follow the machine."""

    max_restarts: int = 3
    """Restarts allowed in a row without a newer snapshot; each newer snapshot refills them."""

    on: Literal["auto", "local", "here"] = "auto"
    """Where workers run: local starts them on this machine, here makes this process the worker,
    auto picks here when torchrun started it and local otherwise."""

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            UsageError: A count is out of range.
        """
        for name, least in (("workers", 1), ("threads", 1), ("max_restarts", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                flag = name.replace("_", "-")
                raise UsageError(f"--{flag} is {value}; it must be at least {least}")
