"""Processes that a verified script starts by itself.

What `mp.spawn` would start runs in verify's own workers, where it is seen. Others are only noted.
"""

import multiprocessing.process
import os
import random
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
import torch.multiprocessing

from paceline.distributed.environment import (
    AGENT_STORE_VARIABLE,
    current_variables,
    without_variables,
)
from paceline.errors import UsageError
from paceline.options.figures import plural
from paceline.verify.patching import Patches

_PROGRAMS = "programs.txt"
_COUNT = (
    "the script calls mp.spawn({name}, nprocs={nprocs}) on {workers}: let their number come from "
    "an argument and give it as {{workers}}, `paceline verify SCRIPT.py -- {{workers}}`; or, "
    'where "RANK" is in os.environ, have it call {name}(int(os.environ["LOCAL_RANK"]), ...) itself'
)
_PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

Placed = Callable[[Mapping[str, str]], None]
"""Called with the environment that identifies this worker, whatever the script changes in it."""


def watch_children(records: Path, patches: Patches, spawned: Placed) -> None:
    """Run spawned functions in this worker, and note what else the script starts.

    Args:
        spawned: Is called when this worker takes the place of a spawned process.
    """
    for module in (torch.multiprocessing, sys.modules["torch.multiprocessing.spawn"]):
        for name in ("spawn", "start_processes"):
            patches.hook(module, name, partial(_spawn, spawned))
    patches.hook(multiprocessing.process.BaseProcess, "start", partial(_start, records))
    patches.before(subprocess.Popen, "__init__", lambda _, args, *__, **___: _note(records, args))
    patches.before(os, "system", partial(_note, records))


def programs_started(records: Path) -> list[str]:
    """List what the workers of a launch have started, each once."""
    path = records / _PROGRAMS
    return list(dict.fromkeys(path.read_text().splitlines())) if path.exists() else []


def _spawn(
    spawned: Placed,
    _: Callable[..., Any],
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    *__: Any,
    **___: Any,
) -> Any:
    place = {n: v for n, v in current_variables().items() if n in _PLACE}
    workers = int(place.get("WORLD_SIZE", 1))
    if nprocs != workers:
        name, count = getattr(fn, "__name__", "main"), plural(workers, "worker")
        raise UsageError(_COUNT.format(name=name, nprocs=nprocs, workers=count))
    spawned(place)
    # A spawned process has random numbers of its own, whatever its parent has drawn.
    torch.manual_seed(torch.Generator().initial_seed())
    random.seed()
    np.random.seed()
    fn(int(place["LOCAL_RANK"]), *args)
    return None if join else _Joined()


@final
class _Joined:
    """What `mp.spawn(..., join=False)` returns: all has been done by then."""

    def join(self, *_: object) -> bool:
        """Wait for nothing."""
        return True


def _start(
    records: Path, original: Callable[..., None], process: multiprocessing.process.BaseProcess
) -> None:
    if process.daemon:  # a reader of data
        return original(process)
    _note(records, f"{process.name} by multiprocessing")
    # If it trains, it must not wait for ranks that are in another group.
    with without_variables(*_PLACE, AGENT_STORE_VARIABLE):
        return original(process)


def _note(records: Path, command: Any) -> None:
    words = [command] if isinstance(command, str | bytes | os.PathLike) else command
    line = " ".join(os.fsdecode(word) for word in words)
    with (records / _PROGRAMS).open("a", encoding="utf-8") as file:
        file.write(" ".join(line.split())[:200] + "\n")
