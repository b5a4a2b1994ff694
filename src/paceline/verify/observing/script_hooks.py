"""Hooks around a plain PyTorch script, which knows nothing of being observed."""

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TextIO, final

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
from paceline.verify.events import Clipped, Combined, Loaded, Monitored, Printed, Reduced, Scaled
from paceline.verify.isolation.subprocesses import watch_children
from paceline.verify.observing.dataloader_hooks import LoaderWatch
from paceline.verify.observing.deadlock_locations import record_locations
from paceline.verify.observing.file_watch import watch_files
from paceline.verify.observing.observer import Observer
from paceline.verify.observing.rng_tracking import watch_dropout
from paceline.verify.observing.steps import StepWatch
from paceline.verify.patching import Patches
from paceline.verify.source_lines import caller
from paceline.verify.trial import output_path

_MAX_REDUCED = 16
"""Elements of a tensor whose values are noted."""
_MAX_LOGGED = 4
"""Elements of a tensor that is taken for figures to be printed rather than for gradients."""
_Original = Callable[..., object]


@contextmanager
def watched(observer: Observer) -> Iterator[None]:
    """Report everything that happens in this process to an observer while the block runs."""
    # Everything is undone in reverse order when the block ends, after an error as well.
    with Patches() as patches:
        # Where samples and random numbers come from.
        records = Path(observer.trial.records)
        watch_children(records, patches, partial(setattr, observer, "place_variables"))
        LoaderWatch(observer).install(patches)
        watch_dropout(
            patches,
            observer.before_dropout,
            observer.remember_draws,
            keep=lambda: observer.trial.keeps_dropout and observer.in_session,
        )
        # Steps: forward pass, backward pass, optimizer, schedule.
        steps = StepWatch(observer)
        _hook_models(observer, steps, patches)
        patches.before(Tensor, "backward", steps.before_backward)
        patches.callback(register_optimizer_step_pre_hook(steps.before_step).remove)
        patches.callback(register_optimizer_step_post_hook(steps.after_step).remove)
        _hook_schedules(observer, steps, patches)
        _place_makers(observer, patches)
        # Communication: scripts import these functions from either module.
        for module in (dist, distributed_c10d):
            patches.hook(module, "init_process_group", partial(_join, observer))
            patches.hook(module, "new_group", partial(_limited, observer))
        for name in ("all_reduce", "reduce"):
            patches.hook(dist, name, partial(_reduce, observer))
        record_locations(patches, records, observer.rank, observer.communicated)
        # What is printed and written.
        file = patches.enter_context(_open_output(output_path(records, observer.rank)))
        for name in ("stdout", "stderr"):
            lines = _Lines(observer, getattr(sys, name), file)
            patches.callback(lines.finish)
            patches.put(sys, name, lines)
        watch_files(observer, patches)
        yield


def _hook_models(observer: Observer, steps: StepWatch, patches: Patches) -> None:
    def wrap(_: object, module: nn.Module, *__: object, **named: object) -> None:
        broadcasts = bool(named.get("broadcast_buffers", True))
        observer.record_model(module, "DistributedDataParallel", broadcasts=broadcasts)

    def forward(
        original: _Original, ddp: DistributedDataParallel, /, *a: object, **n: object
    ) -> object:
        if not torch.is_grad_enabled():
            return original(ddp, *a, **n)
        steps.synced = ddp.require_backward_grad_sync
        if not steps.synced:
            observer.place("unsynced")
        observer.in_wrapper += 1
        try:
            return original(ddp, *a, **n)
        finally:
            observer.in_wrapper -= 1

    def load(result: object, *_: object, **__: object) -> None:
        missing, unexpected = result if isinstance(result, tuple) else ((), ())
        if missing or unexpected:  # with strict=False; else it raises an error
            observer.record(Loaded(tuple(missing), tuple(unexpected), caller()))

    for handle in (
        register_module_forward_pre_hook(lambda part, _: observer.before_forward(part)),
        register_module_parameter_registration_hook(
            lambda part, *_: observer.parameter_registered(part)
        ),
    ):
        patches.callback(handle.remove)
    patches.before(DistributedDataParallel, "__init__", wrap)
    patches.hook(DistributedDataParallel, "forward", forward)
    patches.after(nn.Module, "load_state_dict", load)


def _hook_schedules(observer: Observer, steps: StepWatch, patches: Patches) -> None:
    def step(scheduler: LRScheduler, *arguments: object, **named: object) -> None:
        steps.scheduled += 1
        if getattr(scheduler, "_step_count", 1):  # not its first one, as it is made
            observer.place("schedule")
        figure = next(iter((*arguments, *named.values())), None)
        if isinstance(scheduler, ReduceLROnPlateau) and isinstance(figure, float | int | Tensor):
            observer.record(Monitored(float(figure)))

    def scaled_step(original: _Original, scaler: GradScaler, /, *a: object, **n: object) -> object:
        before, scale = steps.steps.total(), scaler.get_scale()
        result = original(scaler, *a, **n)
        observer.record(Scaled(scale, skipped=steps.steps.total() == before))
        return result

    for kind in set(_with_subclasses(LRScheduler)):
        if "step" in vars(kind):
            patches.before(kind, "step", step)
    patches.hook(GradScaler, "step", scaled_step)


def _with_subclasses(kind: type[object]) -> Iterator[type[object]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _with_subclasses(below)


def _place_makers(observer: Observer, patches: Patches) -> None:
    """Note the lines that make or set what a training depends on: findings point to these."""
    for owner, name, what in (
        (Optimizer, "__init__", "optimizer"),
        (nn.modules.batchnorm._BatchNorm, "__init__", "batchnorm"),
        (nn.Module, "eval", "eval"),
        (DistributedDataParallel, "no_sync", "no_sync"),
        (GradScaler, "__init__", "scaler"),
        (data, "random_split", "split"),
        (data.Subset, "__init__", "subset"),
        (Tensor, "requires_grad_", "thawed"),
        (torch, "manual_seed", "seed"),
        (torch.random, "manual_seed", "seed"),
        (torch, "set_rng_state", "rng_state"),
    ):
        patches.before(owner, name, lambda *_, _what=what, **__: observer.place(_what))
    for clipping in (nn.utils, nn.utils.clip_grad):
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            patches.before(clipping, name, lambda *_, **__: observer.place("clip"))
            patches.before(clipping, name, lambda *_, **__: observer.record(Clipped()))


def _join(observer: Observer, original: _Original, *arguments: object, **named: object) -> object:
    """Make the script's process group, as this machine and the trial allow."""
    given = signature(original).bind(*arguments, **named).arguments
    # NCCL carries no CPU tensors.
    if observer.trial.on_cpu and given.get("backend") == "nccl":
        given["backend"] = "gloo"
    if observer.place_variables:  # the script speaks of processes that it would have started
        set_variables(observer.place_variables)
        for name in ("init_method", "rank", "world_size", "store"):
            given.pop(name, None)
    result = _limited(observer, original, **given)
    observer.meet(joined_only=True)
    return result


def _limited(
    observer: Observer, original: _Original, *arguments: object, **named: object
) -> object:
    """Shorten a process group's time-out: ranks that deadlock fail soon, not after 10 minutes."""
    given = signature(original).bind(*arguments, **named).arguments
    if not observer.in_session:
        limit, own = timedelta(seconds=observer.trial.timeout_s), given.get("timeout")
        given["timeout"] = min(own, limit) if isinstance(own, timedelta) else limit
    return original(**given)


def _reduce(
    observer: Observer, original: _Original, tensor: Tensor, *arguments: object, **named: object
) -> object:
    operation = signature(original).bind(tensor, *arguments, **named).arguments.get("op", "SUM")
    result = original(tensor, *arguments, **named)
    if observer.in_step and tensor.numel() > _MAX_LOGGED:
        observer.record(Combined())
    is_small = tensor.numel() <= _MAX_REDUCED and not tensor.is_complex()
    if result is None and is_small:  # not the asynchronous kind
        values = tuple(tensor.detach().double().reshape(-1).tolist())
        observer.record(Reduced(str(operation).rpartition(".")[2], values))
    return result


def _open_output(path: Path) -> TextIO:
    return path.open("a", encoding="utf-8", errors="replace", buffering=1)


@final
class _Lines(io.TextIOWrapper):
    """A text stream whose lines are noted rather than shown; its buffer is the real stream's."""

    def __init__(self, observer: Observer, real: io.TextIOWrapper, file: TextIO) -> None:
        super().__init__(real.buffer, real.encoding, real.errors)
        self._observer = observer
        self._file = file
        self._line = ""

    def write(self, text: str) -> int:
        """Note whole lines."""
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._note(line)
        return len(text)

    def close(self) -> None:
        """Leave the buffer open, for the real stream."""

    def finish(self) -> None:
        """Note the last line, which nothing ended."""
        self._note(self._line)
        self._line = ""

    def _note(self, line: str) -> None:
        line = line.rpartition("\r")[2]
        if line.strip():
            self._file.write(line + "\n")
            if self._observer.rank == 0:
                self._observer.record(Printed(line, caller()))
