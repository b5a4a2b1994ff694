"""What is said before anything slow."""

import ast
import io
import sys
from pathlib import Path

import pytest

from paceline.runtime import placement
from paceline.runtime.placement import say_starting
from paceline.runtime.spec import Place

SOURCE = Path(placement.__file__).parents[1]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "progress", "told"),
    [
        (Terminal(), "auto", "Starting 2 workers\n"),
        (Terminal(), "off", ""),
        (io.StringIO(), "auto", ""),
        (None, "auto", None),
    ],
)
def test_a_person_at_a_terminal_is_told_what_starts(
    stream: io.StringIO | None, progress: str, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    say_starting(Place(here=False, workers=2), progress)
    assert (stream.getvalue() if stream is not None else None) == told


SLOW = {"psutil", "torch", "rich", "jinja2", "matplotlib", "multiprocessing"}


def imported_by(module: str) -> set[str]:
    """Name what a module of ours imports at its top, in its own text."""
    path = SOURCE.joinpath(*module.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    found = set()
    for node in ast.parse(path.read_text()).body if path.exists() else ():
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
    return found


@pytest.mark.parametrize("command", ["train", "resume", "run"])
def test_it_is_told_before_what_starts_processes_is_imported(command: str) -> None:
    seen, open_ = set[str](), {f"paceline.cli.commands.{command}"}
    while open_:
        module = open_.pop()
        seen.add(module)
        if module.startswith("paceline."):
            open_ |= imported_by(module) - seen
    assert not SLOW & seen
    assert "paceline.runtime.start" not in seen
    assert "paceline.runtime.placement" in seen
