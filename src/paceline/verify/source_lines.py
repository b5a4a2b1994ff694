"""The lines of the script that a finding is about, and how they are found."""

import ast
import linecache
import sys
import sysconfig
from collections.abc import Container, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import FrameType
from typing import TypeVar

from paceline.verify.finding import Case, Cause, Finding

_MOST = 3
"""Lines that a finding names."""
_BEFORE_BACKWARD = 2
"""Assignments to the loss that are named."""

_LIBRARIES = frozenset({"site-packages", "dist-packages"})
_OTHERS = (
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("platstdlib"),
    str(Path(__file__).resolve().parents[1]),
)
"""Where code lies that isn't the user's: Python's own, and Paceline's."""

_KINDS: Mapping[Cause, Sequence[str]] = {
    Cause.NO_COMMUNICATION: ("backward", "step"),
    Cause.NO_SAMPLER: ("training loader",),
    Cause.SET_EPOCH: ("training pass", "training sampler"),
    Cause.DROP_LAST: ("training sampler", "training loader"),
    Cause.PADDED_TRAINING: ("training sampler", "training loader"),
    Cause.PADDED_EVALUATION: ("evaluation sampler", "evaluation loader"),
    Cause.DROPPED_EVALUATION: ("evaluation loader", "evaluation sampler"),
    Cause.SHARES_OVERLAP: ("training sampler",),
    Cause.OTHER_SAMPLES: ("training sampler", "training loader"),
    Cause.OTHER_VALUES: ("training loader",),
    Cause.BATCH_GROWS: ("training loader",),
    Cause.RATE_STAYS: ("training loader", "optimizer"),
    Cause.RATE_DIFFERS: ("optimizer", "schedule"),
    Cause.RATE_APART: ("schedule",),
    Cause.SCHEDULE_PER_WORKER: ("schedule",),
    Cause.GRADIENT_FACTOR: ("collective", "loss", "backward"),
    Cause.MEAN_OF_MEANS: ("loss", "backward"),
    Cause.WEIGHED_ALIKE: ("loss", "backward"),
    Cause.ACROSS_SAMPLES: ("loss", "backward"),
    Cause.CLIPPED_EARLY: ("clip",),
    Cause.BATCHNORM_SHARE: ("batchnorm",),
    Cause.SAME_DROPOUT: ("seed",),
    Cause.SAME_AUGMENTATION: ("seed",),
    Cause.SAME_NOISE: ("seed",),
    Cause.BUFFERS_APART: ("wrap", "batchnorm"),
    Cause.MODES_APART: ("eval",),
    Cause.START_APART: ("seed", "optimizer"),
    Cause.START_HIDDEN: ("seed", "wrap"),
    Cause.OTHER_START: ("seed", "optimizer"),
    Cause.MODELS_DIFFER: ("wrap",),
    Cause.WRAPPER_BYPASSED: ("bypass", "wrap"),
    Cause.NO_SYNC: ("no_sync", "unsynced"),
    Cause.SCALE_APART: ("scaler",),
    Cause.LATE_PARAMETER: ("late", "wrap"),
    Cause.WEIGHTS_APART: ("step", "backward"),
    Cause.UNEQUAL_STEPS: ("training loader",),
    Cause.NO_GRADIENT: ("optimizer",),
    Cause.ORDER_NOT_RESTORED: ("training sampler", "training loader"),
    Cause.RANDOM_NOT_RESTORED: ("seed",),
    Cause.OPTIMIZER_NOT_RESTORED: ("optimizer",),
    Cause.SCHEDULE_NOT_RESTORED: ("schedule",),
    Cause.SCALE_NOT_RESTORED: ("scaler",),
    Cause.BUFFERS_NOT_RESTORED: ("batchnorm",),
    Cause.UNKNOWN: ("loss", "backward"),
}
"""What each cause is the fault of, the likeliest first."""


def caller(outside: Container[int] = ()) -> str:
    """Give file and line of the innermost call by the user's own code; empty where none is.

    Args:
        outside: Objects, by id, whose own methods aren't meant.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if _is_users(name) and not (outside and id(frame.f_locals.get("self")) in outside):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@cache
def _is_users(name: str) -> bool:
    if name.startswith("<") or not _LIBRARIES.isdisjoint(Path(name).parts):
        return False
    # Packages may be installed elsewhere as well (pip install --target).
    installed = (place for place in sys.path if place and any(Path(place).glob("*.dist-info")))
    return not any(Path(name).is_relative_to(other) for other in (*_OTHERS, *installed))


def lines_of(finding: Finding, case: Case) -> tuple[str, ...]:
    """Name the lines of the script that a finding is about, as `file:line`; at most three."""
    found = finding.lines
    for kind in _KINDS.get(finding.cause, ()):
        found += tuple(_places(kind, case))
    return tuple(dict.fromkeys(found))[:_MOST]


def _places(kind: str, case: Case) -> Iterator[str]:
    """Look a kind of place up, in the launch that is explained."""
    places = case.other.places
    about, _, part = kind.partition(" ")
    if part:  # a loader, or what belongs to it
        passes = case.other.training() if about == "training" else case.other.evaluations()
        kind = f"{part} {passes[0].loader}" if passes else ""
    if kind == "loss":
        for place in places.get("backward", ())[:1]:
            yield from assigned(place)
        return
    found = places.get(kind, ())
    yield from reversed(found) if kind == "seed" else found  # the last seed is what counts


def assigned(place: str) -> list[str]:
    """Give the lines before a backward pass that its loss is assigned in, the nearest first.

    Args:
        place: Of the backward pass; only what its innermost loop or function assigns counts.
    """
    name, _, number = place.rpartition(":")
    line = int(number)
    try:
        tree = ast.parse("".join(linecache.getlines(name)))
    except (SyntaxError, ValueError):
        return []
    body = _around(
        tree, (ast.FunctionDef, ast.AsyncFunctionDef, ast.For, ast.AsyncFor, ast.While), line
    )
    statement = _around(tree, (ast.Expr, ast.Assign, ast.Return), line)
    if statement is None:
        return []
    wanted = set(_operands(statement))
    # The nearest assignments to one of the statement's operands.
    lines = {
        node.lineno
        for node in ast.walk(body or tree)
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign)
        and node.lineno < line
        and wanted & set(_targets(node))
    }
    return [f"{name}:{found}" for found in sorted(lines, reverse=True)[:_BEFORE_BACKWARD]]


Kind = TypeVar("Kind", bound=ast.stmt)


def _around(tree: ast.AST, kinds: tuple[type[Kind], ...], line: int) -> Kind | None:
    """Find the innermost statement of some kinds that a line is in."""
    found = None
    for node in ast.walk(tree):  # breadth first: what comes later is further inside
        if isinstance(node, kinds) and node.lineno <= line <= (node.end_lineno or node.lineno):
            found = node
    return found


def _operands(statement: ast.AST) -> Iterator[str]:
    """Name what a statement works on, without the objects whose methods it calls by the way."""
    called = {
        id(node.func.value)
        for node in ast.walk(statement)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr != "backward"
    }
    functions = {id(node.func) for node in ast.walk(statement) if isinstance(node, ast.Call)}
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and id(node) not in called | functions:
            yield node.id


def _targets(node: ast.Assign | ast.AugAssign | ast.AnnAssign) -> Iterator[str]:
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        yield from (part.id for part in ast.walk(target) if isinstance(part, ast.Name))


def shown(place: str) -> str:
    """Write a place for people: its file from here, the line, and what stands in it."""
    name, _, line = place.rpartition(":")
    path = Path(name)
    if path.is_relative_to(Path.cwd()):
        name = str(path.relative_to(Path.cwd()))
    return f"{name}:{line}: {code_at(place)}".rstrip(": ")


def code_at(place: str) -> str:
    """Give what stands in a line."""
    name, _, line = place.rpartition(":")
    return linecache.getline(name, int(line)).strip()
