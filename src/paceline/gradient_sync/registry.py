"""Registry of the `--sync` methods, a row each: built-in ones and those of other packages.

`--sync`, its help, the checks of options and what is made for a training follow from the rows.
Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import final

from paceline.options.entry_points import with_added

ENTRY_POINTS = "paceline.gradient_sync"
"""Group of the entry points by which other packages add rows: a name -> a `SyncEntry`."""


@final
@dataclass(frozen=True, kw_only=True)
class SyncEntry:
    """Description of a `--sync` method, known without importing it."""

    implementation: str
    """What makes the `GradientSync` of a `TrainingContext`, as `module:name`: a class, or a
    function. Imported by the workers alone, since it needs torch."""
    help: str
    """What `--help` says of it: a few words, without a full stop."""
    options: tuple[str, ...] = ()
    """Those of `SyncOptions` that have an effect with it, beside `sync`."""
    label: str = "{sync}"
    """How one line describes it, with the options in braces."""
    needs_shards: bool = False
    """Goes with `--shards`, and nothing else does."""


_HERE = "paceline.training.sync"

OURS: Mapping[str, SyncEntry] = {
    "allreduce": SyncEntry(
        implementation=f"{_HERE}.allreduce:AllReduceSync",
        help="averaged in every step",
        options=("sync_precision",),
    ),
    "ordered": SyncEntry(
        implementation=f"{_HERE}.ordered:OrderedSync",
        help="summed in a fixed order, the same bits on any number of workers (needs --shards)",
        needs_shards=True,
    ),
    "powersgd": SyncEntry(
        implementation=f"{_HERE}.powersgd:PowerSGDSync",
        help="two thin matrices instead of each large one, a hundredth of the bytes, an "
        "approximation",
        options=("sync_warmup_steps", "powersgd_rank"),
        label="{sync} of rank {powersgd_rank}",
    ),
}


@cache
def sync_methods() -> Mapping[str, SyncEntry]:
    """List all that can be chosen: ours, then those of installed packages in order of name.

    Raises:
        UsageError: A package's row can't be had.
    """
    return with_added(OURS, ENTRY_POINTS, SyncEntry, "--sync {}")


def describe_choices() -> str:
    """Say for `--help` what each way is."""
    return " ".join(f"{name}: {entry.help}." for name, entry in sync_methods().items())
