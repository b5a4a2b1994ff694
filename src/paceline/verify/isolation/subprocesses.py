"""Processes that a verified script starts by itself.

What `mp.spawn` would start runs in verify's own workers. Other processes are held back as the
script is, and refused by name where they train.
"""

import json
import multiprocessing.process
import multiprocessing.spawn
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Never, final

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed import distributed_c10d
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.distributed.environment import current_variables, set_variables
from paceline.errors import UsageError
from paceline.files import write_json
from paceline.verify.isolation.file_isolation import writes_isolated
from paceline.verify.patching import Patches
from paceline.verify.trial import Trial

_REFUSED, _PROGRAMS = "refused.json", "programs.txt"
_WORKER = "PACELINE_VERIFIED_WORKER"
_ADVICE = (
    "verify starts the workers itself, one process each, with RANK, LOCAL_RANK, WORLD_SIZE, "
    "MASTER_ADDR and MASTER_PORT in the environment, as torchrun does: it couldn't choose how many "
    "a script starts, nor see what they do. Have the script train in its own process where RANK is "
    'set: `if "RANK" in os.environ: {call}`, with init_process_group("gloo") and no address, rank '
    "or world size of its own. Where it has an option for that, give it after --"
)
_COUNT = (
    "The script starts {number} by mp.spawn, and verify has {workers}: let their number come from "
    "an argument, and give it as {{workers}}: `paceline verify SCRIPT.py -- --nprocs {{workers}}`"
)
_PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_entered: list[ExitStack] = []  # for as long as a spawned process lives


Placed = Callable[[Mapping[str, str]], None]
"""Called with the environment that identifies this worker, whatever the script changes in it."""


def watch_children(trial: Trial, patches: Patches, spawned: Placed | None = None) -> None:
    """Run spawned functions in this worker, refuse processes that train, isolate all others.

    Args:
        spawned: Is called when this worker takes the place of a spawned process; None in processes
            that can't.
    """
    for module in (torch.multiprocessing, sys.modules["torch.multiprocessing.spawn"]):
        for name in ("spawn", "start_processes"):
            patches.hook(module, name, partial(_spawn, trial, spawned))
    # Spawned processes are isolated alike; programs are noted, since what they do isn't seen.
    patches.hook(multiprocessing.spawn, "get_preparation_data", partial(_preparation_data, trial))
    patches.before(subprocess.Popen, "__init__", partial(_note_popen, trial))
    patches.before(os, "system", lambda command: _note_program(trial, os.fsdecode(command)))


def mark_worker() -> None:
    """Mark this process as a worker, by its id: children inherit the mark, but not the id."""
    set_variables({_WORKER: str(os.getpid())})


def refuse_child(trial: Trial, what: str) -> None:
    """Stop where a process that the script has started takes part in a training.

    Raises:
        UsageError: This is such a process.
    """
    worker = int(current_variables().get(_WORKER, os.getpid()))
    if worker != os.getpid():
        name = multiprocessing.process.current_process().name
        try:
            _refuse(trial, f"{name}, which it has started by multiprocessing, {what}")
        finally:
            os.kill(worker, signal.SIGTERM)  # it may wait for what never comes now


def refused(records: Path) -> str:
    """Say what the workers of a launch have refused; empty for nothing."""
    path = records / _REFUSED
    return str(json.loads(path.read_text())) if path.exists() else ""


def programs_started(records: Path) -> list[str]:
    """List the programs that the workers of a launch have started, each once."""
    path = records / _PROGRAMS
    return list(dict.fromkeys(path.read_text().splitlines())) if path.exists() else []


def _refuse(
    trial: Trial, what: str, call: str = 'main(int(os.environ["LOCAL_RANK"]))', count: str = ""
) -> Never:
    parts = (f"the script starts its own training processes: {what}", count)
    message = ". ".join([*filter(None, parts), _ADVICE.format(call=call)])
    write_json(Path(trial.records) / _REFUSED, message)
    raise UsageError(message)


def _spawn(
    trial: Trial,
    spawned: Placed | None,
    original: Callable[..., Any],
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    *others: Any,
    **named: Any,
) -> Any:
    place = {n: v for n, v in current_variables().items() if n in _PLACE}
    workers = int(place.get("WORLD_SIZE", 1))
    if spawned is None or nprocs != workers:
        name = getattr(fn, "__name__", "main")
        call = f'{name}(int(os.environ["LOCAL_RANK"]), ...)'
        count = _COUNT.format(number=nprocs, workers=workers)
        _refuse(trial, f"mp.spawn({name}, nprocs={nprocs})", call, count)
    spawned(place)
    # A spawned process has random numbers of its own, whatever its parent has drawn.
    torch.manual_seed(torch.Generator().initial_seed())
    random.seed()
    np.random.seed()
    fn(int(place["LOCAL_RANK"]), *args)
    return None if join else _Joined()


@final
class _Joined:
    """What `mp.spawn(..., join=False)` gives: all has been done by then."""

    def join(self, *_: object) -> bool:
        """Wait for nothing."""
        return True


@final
class _Entry:
    """What a spawned process unpickles before it imports anything of the script's."""

    def __init__(self, trial: str) -> None:
        self._trial = trial

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return _enter, (self._trial,)


def _enter(text: str) -> None:
    # The same isolation as in the worker, before the script is imported.
    trial, stack = Trial.from_json(text), ExitStack()
    stack.enter_context(writes_isolated(trial))
    patches = stack.enter_context(Patches())
    watch_children(trial, patches)
    # Reading data is allowed; taking part in a training is not.
    for module in (dist, distributed_c10d):
        patches.before(module, "init_process_group", lambda *_, **__: refuse_child(trial, JOINS))
    hook = register_optimizer_step_pre_hook(lambda *_: refuse_child(trial, STEPS))
    stack.callback(hook.remove)
    _entered.append(stack)


JOINS = "calls init_process_group"
STEPS = "takes an optimizer's step"


def _preparation_data(
    trial: Trial, original: Callable[..., Any], *arguments: Any, **named: Any
) -> dict[str, Any]:
    # First of all: what a spawned process does next is to import the script.
    return {"paceline": _Entry(trial.to_json()), **original(*arguments, **named)}


def _note_popen(trial: Trial, process: object, args: Any, *_: object, **__: object) -> None:
    words = [args] if isinstance(args, str | bytes | os.PathLike) else list(args)
    _note_program(trial, " ".join(os.fsdecode(word) for word in words))


def _note_program(trial: Trial, line: str) -> None:
    with (Path(trial.records) / _PROGRAMS).open("a", encoding="utf-8") as file:
        file.write(" ".join(line.split())[:200] + "\n")
