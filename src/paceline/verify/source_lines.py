"""The lines of the script that a finding is about, and how they are found."""

import ast
import linecache
import sys
import sysconfig
from collections.abc import Container, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import FrameType
from typing import TypeVar

from paceline.verify.finding import Finding
from paceline.verify.trace import Trace

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


def is_within(function: str) -> bool:
    """Tell whether a function of this name is being called."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return frame is not None


@cache
def _is_users(name: str) -> bool:
    if name.startswith("<") or not _LIBRARIES.isdisjoint(Path(name).parts):
        return False
    # Packages may be installed elsewhere as well (pip install --target).
    installed = (place for place in sys.path if place and any(Path(place).glob("*.dist-info")))
    return not any(Path(name).is_relative_to(other) for other in (*_OTHERS, *installed))


def lines_of(finding: Finding, trace: Trace) -> tuple[str, ...]:
    """Name the lines of the script that a finding is about, as `file:line`; at most three."""
    found = [*finding.lines, *(at for kind in finding.cause.lines for at in places(kind, trace))]
    return tuple(dict.fromkeys(found))[:_MOST]


def places(kind: str, trace: Trace) -> Sequence[str]:
    """Look a kind of place up, in the launch that is explained."""
    known = trace.places
    if kind == "loss":
        return [line for at in known.get("backward", ())[:1] for line in assigned(at)]
    if kind == "continue":
        return [line for at in places("training pass", trace)[:1] for line in continued(at)]
    about, _, part = kind.partition(" ")
    if part:  # a loader, or what belongs to it
        passes = trace.training() if about == "training" else trace.evaluations()
        kind = f"{part} {passes[0].loader}" if passes else ""
    found = known.get(kind, ())
    return found[::-1] if kind in ("seed", "thawed") else found  # the last one is what counts


def continued(place: str) -> list[str]:
    """Give the lines in which the loop at a place goes on with its next turn early."""
    name, tree, line = _parsed(place)
    loop = _around(tree, (ast.For, ast.AsyncFor, ast.While), line)
    found = [node.lineno for node in ast.walk(loop or tree) if isinstance(node, ast.Continue)]
    return [f"{name}:{number}" for number in sorted(found)]


def assigned(place: str) -> list[str]:
    """Give the lines before a backward pass that its loss is assigned in, the nearest first.

    Args:
        place: Of the backward pass; only what its innermost loop or function assigns counts.
    """
    name, tree, line = _parsed(place)
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.For, ast.AsyncFor, ast.While)
    body, statement = _around(tree, kinds, line), _around(tree, (ast.Expr, ast.Assign), line)
    # Names that the statement works on, without objects whose methods it calls by the way.
    wanted = {node.id for node in ast.walk(statement or ast.Pass()) if isinstance(node, ast.Name)}
    lines = {
        node.lineno
        for node in ast.walk(body or tree)
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign)
        and node.lineno < line
        and wanted & set(_targets(node))
    }
    return [f"{name}:{found}" for found in sorted(lines, reverse=True)[:_BEFORE_BACKWARD]]


def _parsed(place: str) -> tuple[str, ast.Module, int]:
    name, _, number = place.rpartition(":")
    try:
        return name, ast.parse("".join(linecache.getlines(name))), int(number)
    except (SyntaxError, ValueError):
        return name, ast.Module([], []), int(number)


Kind = TypeVar("Kind", bound=ast.stmt)


def _around(tree: ast.AST, kinds: tuple[type[Kind], ...], line: int) -> Kind | None:
    """Find the innermost statement of some kinds that a line is in."""
    found = None
    for node in ast.walk(tree):  # breadth first: what comes later is further inside
        if isinstance(node, kinds) and node.lineno <= line <= (node.end_lineno or node.lineno):
            found = node
    return found


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
