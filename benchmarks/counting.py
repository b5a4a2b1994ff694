"""Exact counts of what code does: Python opcodes, ATen operators, waits for the device."""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import final

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

_SYNC_OPERATORS = frozenset(("aten._local_scalar_dense", "aten.is_nonzero", "aten.nonzero"))
_SYNC_CALLS = frozenset(("tolist", "numpy", "cpu"))
"""Tensor methods that fetch from the device without an operator of the set above."""
_ROOT = Path(__file__).parents[1]


@dataclass(kw_only=True)
class Counts:
    """What some steps did."""

    opcodes: Counter[str] = field(default_factory=Counter)
    """Python opcodes by function, `package.module.function`."""
    operators: Counter[str] = field(default_factory=Counter)
    """ATen operators by name."""
    syncs: Counter[str] = field(default_factory=Counter)
    """Fetches from the device to the host, by what did them."""


@final
class _Operators(TorchDispatchMode):
    """Counts operators, those of the backward pass included (on the CPU it runs in this thread)."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts = counts

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        name = str(func).rpartition(".")[0]
        self._counts.operators[name] += 1
        if name in _SYNC_OPERATORS:
            self._counts.syncs[name] += 1
        return func(*args, **(kwargs or {}))


def count_opcodes(run: Callable[[], None], leave_out: Sequence[Path]) -> Counter[str]:
    """Run something and count the Python opcodes it takes, by function.

    Args:
        run: What to count.
        leave_out: Files whose own code isn't counted (what it calls is).
    """
    found: Counter[str] = Counter()
    skipped = {str(path) for path in (*leave_out, Path(__file__))}

    def count(code: CodeType) -> None:
        if code.co_filename not in skipped:
            found[f"{_module(code.co_filename)}.{code.co_qualname}"] += 1

    if sys.version_info >= (3, 12):
        _monitored(run, count)
    else:
        _traced(run, count)
    return found


def _traced(run: Callable[[], None], count: Callable[[CodeType], None]) -> None:
    """Run something; each opcode is told. From Python 3.13 on this misses a code's first run."""

    def trace(frame: FrameType, event: str, argument: object) -> object:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return local

    def local(frame: FrameType, event: str, argument: object) -> object:
        if event == "opcode":
            count(frame.f_code)
        return local

    before = sys.gettrace()
    sys.settrace(trace)  # type: ignore[arg-type]  # its own type can't be written
    try:
        run()
    finally:
        sys.settrace(before)


if sys.version_info >= (3, 12):

    def _monitored(run: Callable[[], None], count: Callable[[CodeType], None]) -> None:
        """Run something; each opcode of this thread is told."""
        monitoring, thread = sys.monitoring, threading.get_ident()

        def instruction(code: CodeType, offset: int) -> None:
            if threading.get_ident() == thread:
                count(code)

        tool = monitoring.PROFILER_ID
        monitoring.use_tool_id(tool, "opcodes")
        try:
            monitoring.register_callback(tool, monitoring.events.INSTRUCTION, instruction)
            monitoring.set_events(tool, monitoring.events.INSTRUCTION)
            run()
        finally:
            monitoring.set_events(tool, monitoring.events.NO_EVENTS)
            monitoring.free_tool_id(tool)


def count_operators(run: Callable[[], None]) -> Counts:
    """Run something and count its ATen operators and its waits for the device."""
    counts = Counts()

    def profile(frame: FrameType, event: str, function: object) -> None:
        name = getattr(function, "__name__", "")
        owner = getattr(function, "__self__", None)
        if event == "c_call" and name in _SYNC_CALLS and isinstance(owner, torch.Tensor):
            counts.syncs[f"Tensor.{name}"] += 1

    before = sys.getprofile()
    with _Operators(counts):
        sys.setprofile(profile)
        try:
            run()
        finally:
            sys.setprofile(before)
    return counts


def _module(file: str) -> str:
    """Shorten a file's path to its module's name, below the package that it belongs to."""
    path = Path(file)
    for base in (_ROOT / "src", _ROOT):
        if path.is_relative_to(base) and "site-packages" not in path.parts:
            return ".".join(path.relative_to(base).with_suffix("").parts)
    parts = path.with_suffix("").parts
    start = parts.index("site-packages") + 1 if "site-packages" in parts else -1
    return ".".join(parts[start:])


def collectives_so_far() -> int:
    """Read the process group's own count of collectives."""
    number: int = dist.group.WORLD._get_sequence_number_for_group()  # type: ignore[union-attr]
    return number
