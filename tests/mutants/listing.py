"""The list of mutants: small faults of the kind people make, each with the tests that must see it.

One TOML file a package in `list/`, an entry a mutant:

    [["training/optimizer_step.py"]]
    old = "batch.local / batch.total"      # stands exactly once in the file
    new = "1 / batch.total"
    harm = "what it would do to a user"
    tests = "training/test_optimizer_step.py::test_name training/test_shards.py"
    lives = "why no test sees it"          # only where that is so
"""

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
SOURCE = REPOSITORY / "src" / "paceline"
TESTS = REPOSITORY / "tests"
LIST = Path(__file__).parent / "list"
_KEYS = {"old", "new", "harm", "tests"}


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One change of one file."""

    file: str
    """Under src/paceline."""
    old: str
    new: str
    harm: str
    """What it would do to a user."""
    tests: tuple[str, ...]
    """Files or node ids under tests/ of which one must fail."""
    lives: str = ""
    """Why no test sees it, where that is known and accepted."""

    @property
    def package(self) -> str:
        """The first folder of the file."""
        return self.file.split("/")[0] if "/" in self.file else "."

    def apply(self, text: str) -> str:
        """Give the file's text with the change.

        Raises:
            ValueError: The old text isn't there exactly once, or the new one is no Python.
        """
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.file}: {self.old!r} stands there {count} times, not once")
        if self.old.split() == self.new.split():
            raise ValueError(f"{self.file}: {self.old!r} -> {self.new!r} changes nothing")
        mutated = text.replace(self.old, self.new)
        try:
            ast.parse(mutated)
        except SyntaxError as error:
            raise ValueError(f"{self.file}: {self.new!r} is no Python: {error}") from None
        return mutated


def read_list(directory: Path = LIST) -> list[Mutant]:
    """Read all mutants, in the order of the files and of the entries in them."""
    return [mutant for path in sorted(directory.glob("*.toml")) for mutant in _read(path)]


def _read(path: Path) -> Iterator[Mutant]:
    for file, entries in tomllib.loads(path.read_text()).items():
        for entry in entries:
            yield _mutant(file, entry)


def _mutant(file: str, entry: dict[str, Any]) -> Mutant:
    if not _KEYS <= entry.keys() <= _KEYS | {"lives"}:
        raise ValueError(f"{file}: an entry has {sorted(_KEYS)} and may have lives: {entry}")
    return Mutant(file=file, **{**entry, "tests": tuple(entry["tests"].split())})


def find_fault(mutant: Mutant) -> str | None:
    """Say why a mutant can't be tried on today's source; None if it can."""
    try:
        mutant.apply((SOURCE / mutant.file).read_text())
    except (OSError, ValueError) as error:
        return str(error)
    for test in mutant.tests:
        path, _, name = test.partition("::")
        if not (TESTS / path).is_file():
            return f"{mutant.file}: there is no tests/{path}"
        if name and f"def {name.split('[')[0]}(" not in (TESTS / path).read_text():
            return f"{mutant.file}: there is no {name} in tests/{path}"
    return None if mutant.tests else f"{mutant.file}: {mutant.old!r} names no test"
