"""Where each rank is when ranks wait for one another in vain."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from io import FileIO
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from paceline.launch.errors.failures import WorkerFailure, is_lost_peer
from paceline.options.figures import plural
from paceline.verify.events import Ended, Event, Stepped
from paceline.verify.patching import Patches
from paceline.verify.source_lines import caller

_CALLS = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
)
_WIDTH = 1024
_BACKWARD, _NOWHERE = "a backward pass", "in no such call"


def record_locations(
    patches: Patches, records: Path, rank: int, met: Callable[[str], object]
) -> None:
    """Keep the name of the collective call that a rank is in, in a file that outlives the rank.

    Args:
        met: Is called with its name after each collective call.
    """
    file = patches.enter_context(_path(records, rank).open("wb", buffering=0))

    def call(name: str, original: Callable[..., object], /, *a: object, **named: object) -> object:
        _note(file, f"{name} at {at}" if (at := caller()) else name)
        result = original(*a, **named)
        _note(file, "")  # not where it fails: that is where the rank was
        if name != _BACKWARD:  # by itself no collective
            met(name)
        return result

    for name in _CALLS:
        patches.hook(dist, name, partial(call, f"{name}()"))
    patches.hook(Tensor, "backward", partial(call, _BACKWARD))
    wrapping = partial(call, "the making of DistributedDataParallel")
    patches.hook(DistributedDataParallel, "__init__", wrapping)


def _note(file: FileIO, name: str) -> None:
    # One write of fixed width at offset 0: a killed rank leaves the old name or the new one.
    os.pwrite(file.fileno(), name.encode().ljust(_WIDTH)[:_WIDTH], 0)


def read_locations(records: Path, ranks: Sequence[Sequence[Event]]) -> list[str]:
    """Say where each rank was last.

    Args:
        ranks: Each rank's events in order.
    """
    return [_place(_path(records, rank), events) for rank, events in enumerate(ranks)]


def lost_one_another(cause: WorkerFailure, places: Sequence[str]) -> bool:
    """Tell whether a launch failed since its ranks waited for one another in different places.

    Gloo aborts a process that is sent what belongs to another call than its own.
    """
    if len(set(places)) < 2:
        return False
    if cause.signal_name == "SIGABRT":
        return places[cause.rank].startswith("in ") and _NOWHERE not in places[cause.rank]
    is_lost = is_lost_peer(cause.error_type, cause.traceback or cause.message)
    return is_lost and cause.kind == "infrastructure"


def _place(path: Path, events: Sequence[Event]) -> str:
    call = path.read_text().strip() if path.exists() else ""
    place = f"in {call}" if call else _NOWHERE
    if any(isinstance(event, Ended) for event in events):
        place = "at the script's end"
    steps = sum(isinstance(event, Stepped) and event.optimizer == 0 for event in events)
    return f"{place} after {plural(steps, 'step')}"


def _path(records: Path, rank: int) -> Path:
    return records / f"rank-{rank}.call"
