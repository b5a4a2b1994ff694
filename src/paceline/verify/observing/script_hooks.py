"""Hooks around a plain PyTorch script, which knows nothing of being watched."""

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TextIO, cast, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed import distributed_c10d
from torch.nn.modules.module import (
    register_module_forward_pre_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils import data

from paceline.distributed.environment import set_variables
from paceline.verify.events import Clipped, Loaded, Monitored, Printed, Scaled
from paceline.verify.isolation.subprocesses import JOINS, STEPS, refuse_child, watch_children
from paceline.verify.observing.dataloader_hooks import LoaderWatch
from paceline.verify.observing.deadlock_locations import locations_recorded
from paceline.verify.observing.file_watch import files_watched
from paceline.verify.observing.observer import Observer
from paceline.verify.observing.rng_tracking import dropout_watched
from paceline.verify.patching import Patches
from paceline.verify.source_lines import caller
from paceline.verify.trial import EnoughSeenError, output_path


@contextmanager
def watched(observer: Observer) -> Iterator[None]:
    """Pass everything that happens in this process to an observer while the block runs."""
    with ExitStack() as stack:
        # Everything is undone in reverse order when the stack closes, after an error as well.
        patches = stack.enter_context(Patches())
        # Where samples and random numbers come from.
        watch_children(observer.trial, patches, observer.spawned)
        stack.enter_context(LoaderWatch(observer).installed())
        stack.enter_context(
            dropout_watched(
                observer.before_dropout,
                observer.after_draw,
                keep=lambda: observer.trial.keeps_dropout and observer.in_session,
            )
        )
        # Steps: forward pass, backward pass, optimizer, schedule.
        _hook_optimizers(observer, stack)
        handle = register_module_forward_pre_hook(lambda part, _: observer.before_forward(part))
        stack.callback(handle.remove)
        patches.before(Tensor, "backward", lambda loss, *_, **__: observer.before_backward(loss))
        patches.hook(DistributedDataParallel, "__init__", partial(_make_ddp, observer))
        patches.hook(DistributedDataParallel, "forward", partial(_forward, observer))
        late = register_module_parameter_registration_hook(
            lambda part, *_: observer.parameter_registered(part)
        )
        stack.callback(late.remove)
        _place_makers(observer, patches)
        for kind in _schedulers():
            patches.hook(kind, "step", partial(_schedule_step, observer))
        # Communication: scripts import these functions from either module.
        for module in (dist, distributed_c10d):
            patches.hook(module, "init_process_group", partial(_init_process_group, observer))
            patches.hook(module, "new_group", partial(_new_group, observer))
        for name in ("all_reduce", "reduce"):
            patches.hook(dist, name, partial(_reduce, observer))
        records = Path(observer.trial.records)
        stack.enter_context(locations_recorded(records, observer.rank, observer.communicated))
        stack.enter_context(_printing_noted(observer))
        # Checkpoints and other files.
        patches.hook(nn.Module, "load_state_dict", partial(_load, observer))
        stack.enter_context(files_watched(observer))
        yield


def _hook_optimizers(observer: Observer, stack: ExitStack) -> None:
    def before(optimizer: Optimizer, *_: object) -> None:
        """Note gradients and weights, or end the script once enough was seen."""
        if observer.steps >= observer.trial.steps * (observer.trial.epochs + 1):
            raise EnoughSeenError  # no DataLoader whose passes could be counted
        refuse_child(observer.trial, STEPS)
        observer.before_step(optimizer)

    def after(optimizer: Optimizer, *_: object) -> None:
        observer.after_step(optimizer)

    stack.callback(register_optimizer_step_pre_hook(before).remove)
    stack.callback(register_optimizer_step_post_hook(after).remove)


def _make_ddp(
    observer: Observer,
    original: Callable[..., object],
    wrapper: nn.Module,
    module: nn.Module,
    *arguments: object,
    **named: object,
) -> object:
    broadcasts = bool(named.get("broadcast_buffers", True))
    observer.record_model(module, "DistributedDataParallel", broadcasts=broadcasts)
    return original(wrapper, module, *arguments, **named)


def _forward(
    observer: Observer,
    original: Callable[..., object],
    wrapper: DistributedDataParallel,
    /,  # keywords are the model's own
    *arguments: object,
    **named: object,
) -> object:
    if not torch.is_grad_enabled():
        return original(wrapper, *arguments, **named)
    observer.wrapper_entered(synced=wrapper.require_backward_grad_sync)
    try:
        return original(wrapper, *arguments, **named)
    finally:
        observer.wrapper_left()


def _place_makers(observer: Observer, patches: Patches) -> None:
    """Note the lines that make or set what a training depends on."""
    # Only where they stand is noted: findings point to these lines.
    for owner, name, what in (
        (Optimizer, "__init__", "optimizer"),
        (nn.modules.batchnorm._BatchNorm, "__init__", "batchnorm"),
        (nn.Module, "eval", "eval"),
        (DistributedDataParallel, "no_sync", "no_sync"),
        (GradScaler, "__init__", "scaler"),
        (data, "random_split", "split"),
        (data.Subset, "__init__", "subset"),
        (torch, "manual_seed", "seed"),
        (torch.random, "manual_seed", "seed"),
    ):
        patches.before(owner, name, partial(_place, observer, what))
    patches.hook(GradScaler, "step", partial(_scaled_step, observer))
    for clipping in (nn.utils, nn.utils.clip_grad):
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            patches.before(clipping, name, partial(_note_clipping, observer))


def _place(observer: Observer, what: str, *_: object, **__: object) -> None:
    observer.place(what)


def _scaled_step(
    observer: Observer,
    original: Callable[..., object],
    scaler: GradScaler,
    /,
    *arguments: object,
    **named: object,
) -> object:
    before, scale = observer.all_steps, scaler.get_scale()
    result = original(scaler, *arguments, **named)
    observer.record(Scaled(scale, skipped=observer.all_steps == before))
    return result


def _load(
    observer: Observer,
    original: Callable[..., object],
    module: nn.Module,
    /,
    *arguments: object,
    **named: object,
) -> object:
    result = original(module, *arguments, **named)
    missing, unexpected = result if isinstance(result, tuple) else ((), ())
    if missing or unexpected:  # else it raises an error
        observer.record(Loaded(tuple(missing), tuple(unexpected), caller()))
    return result


def _note_clipping(observer: Observer, *_: object, **__: object) -> None:
    observer.record(Clipped())
    observer.place("clip")


def _schedulers() -> list[type[LRScheduler]]:
    """List the schedulers that have a `step` of their own."""
    found: list[type[LRScheduler]] = []
    waiting: list[type[LRScheduler]] = [LRScheduler]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if "step" in vars(kind):
            found.append(kind)
    return found


def _schedule_step(
    observer: Observer,
    original: Callable[..., object],
    scheduler: object,
    /,
    *arguments: object,
    **named: object,
) -> object:
    observer.scheduled += 1
    if getattr(scheduler, "_step_count", 1):  # not its first one, as it is made
        observer.place("schedule")
    figure = next(iter((*arguments, *named.values())), None)
    if isinstance(scheduler, ReduceLROnPlateau) and isinstance(figure, float | int | Tensor):
        observer.record(Monitored(float(figure)))
    return original(scheduler, *arguments, **named)


def _init_process_group(
    observer: Observer,
    original: Callable[..., object],
    backend: str | None = None,
    init_method: str | None = None,
    timeout: object = None,
    *arguments: object,
    **named: object,
) -> object:
    refuse_child(observer.trial, JOINS)
    # NCCL carries no CPU tensors.
    if observer.trial.on_cpu and backend == "nccl":
        backend = "gloo"
    if not observer.in_session:
        timeout = _limited(observer, timeout)
    if observer.place_variables:  # the script speaks of processes that it would have started
        set_variables(observer.place_variables)
        init_method, arguments = None, ()
        named = {n: v for n, v in named.items() if n not in ("rank", "world_size", "store")}
    result = original(backend, init_method, timeout, *arguments, **named)
    observer.meet(joined_only=True)
    return result


def _new_group(
    observer: Observer,
    original: Callable[..., object],
    ranks: object = None,
    timeout: object = None,
    *arguments: object,
    **named: object,
) -> object:
    if not observer.in_session:
        timeout = _limited(observer, timeout)
    return original(ranks, timeout, *arguments, **named)


def _limited(observer: Observer, timeout: object) -> timedelta:
    """Shorten the process group's time-out: ranks that deadlock fail soon, not after 10 minutes."""
    limit = timedelta(seconds=observer.trial.timeout_s)
    return min(timeout, limit) if isinstance(timeout, timedelta) else limit


def _reduce(
    observer: Observer,
    original: Callable[..., object],
    tensor: Tensor,
    *arguments: object,
    **named: object,
) -> object:
    operation = next((a for a in arguments if isinstance(a, dist.ReduceOp.RedOpType)), None)
    operation = operation or named.get("op", dist.ReduceOp.SUM)  # type: ignore[assignment]
    before = tensor.detach().clone()
    result = original(tensor, *arguments, **named)
    observer.combined(tensor)
    if result is None:  # not the asynchronous kind
        observer.reduced(str(operation).rpartition(".")[2], before, tensor)
    return result


@contextmanager
def _printing_noted(observer: Observer) -> Iterator[None]:
    """Note what is printed rather than show it."""
    before = sys.stdout, sys.stderr
    path = output_path(Path(observer.trial.records), observer.rank)
    with path.open("a", encoding="utf-8", errors="replace", buffering=1) as file:
        lines = [_Lines(observer, real, file) for real in before]
        sys.stdout, sys.stderr = (cast(TextIO, stream) for stream in lines)
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before
            for stream in lines:
                stream.finish()


@final
class _Lines(io.TextIOBase):
    """A text stream whose lines are noted, and by rank 0's observer; all else is the real one's."""

    def __init__(self, observer: Observer, real: TextIO, file: TextIO) -> None:
        self._observer = observer
        self._real = real
        self._file = file
        self._line = ""

    def __getattr__(self, name: str) -> object:
        """Give what a text stream needn't have: `buffer`, `name`, `mode` .."""
        return getattr(self._real, name)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The real stream's."""
        return self._real.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        """The real stream's."""
        return self._real.errors

    def fileno(self) -> int:
        """Give the real stream's."""
        return self._real.fileno()

    def isatty(self) -> bool:
        """Tell whether the real stream is a terminal."""
        return self._real.isatty()

    def flush(self) -> None:
        """Flush the real stream: what was written to its `buffer` waits there."""
        self._real.flush()

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, text: str) -> int:
        """Note whole lines."""
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._note(line)
        return len(text)

    def finish(self) -> None:
        """Note the last line, which nothing ended."""
        self._note(self._line)
        self._line = ""

    def _note(self, line: str) -> None:
        line = line.rpartition("\r")[2]
        if not line.strip():
            return
        self._file.write(line + "\n")
        if self._observer.rank == 0:
            self._observer.record(Printed(line, caller()))
