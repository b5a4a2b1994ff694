"""What a step costs: the counters after each one of a training, without what may wait.

About once a second the workers exchange how they are, and now and then there is a snapshot or an
evaluation. These fetch from the device, and depend on the clock; no step's cost is theirs.
"""

import ctypes
import functools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, final

import torch

from tests.pretend_gpu.counters import COUNTERS, WARM_UP_STEPS, counted_here

_MAY_WAIT = ("begin", "agree", "_save", "_close_pass", "close_epoch")
"""Methods of `paceline.training.engine.Engine`; so may its `evaluation`, before and after."""

_AT_THE_END = ("load_best", "fingerprint", "state_fingerprint")
"""Methods of `SnapshotManager`."""

_BY_SCRIPTS = ("item", "tolist", "cpu", "__bool__", "__float__", "__format__")
"""Methods of `Tensor` that wait where a script says so; whoever else calls them may not."""


@final
class _Spent:
    """What this process has spent where it may wait."""

    def __init__(self) -> None:
        self.counted: Counter[str] = Counter()
        self.count = counted_here
        self.steps = 0
        self.is_inside = False

    @contextmanager
    def may_wait(self) -> Iterator[None]:
        """Leave out what is done within a block; torch refuses no waits in it."""
        if self.is_inside:
            yield
            return
        self.is_inside = True
        before = self.count()
        mode = _refuse_waits(0)
        try:
            yield
        finally:
            self.is_inside = False  # also where a signal ends the training
            _refuse_waits(mode)
            self.counted.update(self.count() - before)


_spent = _Spent()


def refuse_waits_in_steps(engine: ModuleType) -> None:
    """Have torch refuse operations that wait, once a training is warm; on any CUDA device.

    Args:
        engine: The module `paceline.training.engine`.
    """
    _spent.count = Counter  # a real device counts nothing
    _after_steps(engine, _refuse_when_warm)
    _leave_out_waits(engine)


def note_steps(engine: ModuleType) -> None:
    """Write a line a step into PRETEND_GPU_COUNTERS/PROCESS.steps, where that is set.

    With PRETEND_GPU_WAITS=refused torch refuses operations that wait, once a training is warm.

    Args:
        engine: The module `paceline.training.engine`.
    """
    _after_steps(engine, _note)
    _leave_out_waits(engine)
    _leave_out_what_scripts_fetch()
    from paceline.checkpoint import writer

    # A snapshot is written by a thread of its own, which waits for its copies beside the steps.
    made = functools.partial(ThreadPoolExecutor, initializer=_beside_training)
    writer.ThreadPoolExecutor = made  # type: ignore[assignment, attr-defined]


def _leave_out_what_scripts_fetch() -> None:
    for owner, name in (*((torch.Tensor, name) for name in _BY_SCRIPTS), (torch, "save")):
        plain = getattr(owner, name)
        setattr(owner, name, _left_out(plain, of=_is_script))


def _is_script(caller: str) -> bool:
    return caller.partition(".")[0] not in ("paceline", "torch", "tests")


def _after_steps(engine: ModuleType, note: Callable[[], None]) -> None:
    plain = engine.Engine._count_step

    @functools.wraps(plain)
    def count_step(training: object) -> None:
        plain(training)
        note()

    engine.Engine._count_step = count_step


def _leave_out_waits(engine: ModuleType) -> None:
    """Leave out what Paceline may wait for."""
    from paceline.data import memory
    from paceline.gradient_sync import replica_consistency
    from paceline.training import losses
    from paceline.training.evaluation import distributed_mean, validation
    from paceline.training.snapshots import manager

    for owner, name in (
        *((engine.Engine, name) for name in _MAY_WAIT),
        (validation.Validation, "measure_time"),
        (distributed_mean, "_counted"),  # an evaluation's result is fetched at its end
        (replica_consistency, "_row"),  # --check-every compares the weights
        *((manager.SnapshotManager, name) for name in _AT_THE_END),
        # Once in a training: data sets are moved to the device, the first targets are looked at.
        (memory.MemorySource, "__init__"),
        (losses.CheckedLoss, "_check_classes"),
    ):
        setattr(owner, name, _left_out(getattr(owner, name)))
    engine.Engine.evaluation = _ends_left_out(engine.Engine.evaluation)


def _beside_training() -> None:
    """Have this thread's waits not counted."""
    ctypes.CDLL(None).pretend_gpu_beside_training(1)


def _ends_left_out(
    method: Callable[..., AbstractContextManager[None]],
) -> Callable[..., AbstractContextManager[None]]:
    @functools.wraps(method)
    @contextmanager
    def left_out(*args: object, **kwargs: object) -> Iterator[None]:
        ends = ExitStack()
        with _spent.may_wait():
            ends.enter_context(method(*args, **kwargs))
        try:
            yield
        except BaseException:
            if not ends.__exit__(*sys.exc_info()):
                raise
        else:
            with _spent.may_wait():
                ends.close()

    return left_out


def _left_out(
    method: Callable[..., Any], of: Callable[[str], bool] = lambda _: True
) -> Callable[..., Any]:
    """Leave out what a method spends, where the module that calls it is one `of` these."""

    @functools.wraps(method)
    def left_out(*args: object, **kwargs: object) -> object:
        if not of(sys._getframe(1).f_globals["__name__"]):
            return method(*args, **kwargs)
        with _spent.may_wait():
            return method(*args, **kwargs)

    return left_out


def _refuse_waits(mode: int) -> int:
    """Have torch refuse operations that wait (2), or not (0); returns what it did before."""
    if not torch.cuda.is_initialized():
        return mode
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(mode)
    return before


def _refuse_when_warm() -> None:
    _spent.steps += 1
    if _spent.steps == WARM_UP_STEPS:
        _refuse_waits(2)


def _note() -> None:
    directory = os.environ.get("PRETEND_GPU_COUNTERS")
    if not directory:
        return
    if os.environ.get("PRETEND_GPU_WAITS") == "refused":
        _refuse_when_warm()
    counted = counted_here() - _spent.counted
    with Path(directory, f"{os.getpid()}.steps").open("a") as file:
        print(*(counted[name] for name in COUNTERS), file=file)
