"""Choices of an option that other installed packages add by entry points."""

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from paceline.errors import UsageError
from paceline.options.text import clause

Entry = TypeVar("Entry")


def imported(reference: str) -> Any:
    """Import what a `module:name` of a registry names."""
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)


@cache
def _installed() -> Mapping[str, Sequence[EntryPoint]]:
    """Read them once a process, by group: that looks at every installed package."""
    points = entry_points()
    ours = [group for group in points.groups if group.startswith("paceline.")]
    return {group: sorted(points.select(group=group), key=lambda e: e.name) for group in ours}


def added_names(group: str) -> list[str]:
    """List the names of a group's entry points, sorted. Imports none of them."""
    return [point.name for point in _installed().get(group, ())]


def with_added(
    ours: Mapping[str, Entry],
    group: str,
    kind: type[Entry],
    what: str,
    reserved: Collection[str] = (),
) -> Mapping[str, Entry]:
    """Import what other packages add to a registry, and give it after ours, in order of name.

    Args:
        ours: Our rows, by name.
        kind: What each has to name an instance of.
        what: What is added, for messages, with `{}` for the name: `--sync {}`.
        reserved: Names that nobody may take, beside those of ours.

    Raises:
        UsageError: One has a name that is taken, can't be imported, or is of another kind.
    """
    known = dict(ours)
    for point in _installed().get(group, ()):
        package = point.dist.name if point.dist else "a package"
        added = f"{package} adds {what.format(point.name)} ({point.value})"
        if point.name in (*reserved, *known):
            raise UsageError(f"{added}, which has a name that is taken: uninstall the package")
        known[point.name] = _load(point, kind, added)
    return known


def _load(point: EntryPoint, kind: type[Entry], added: str) -> Entry:
    try:
        entry = point.load()
    except Exception as error:  # whatever another package's code may raise
        raise UsageError(
            f"{added}, which can't be imported: {clause(error)} ({type(error).__name__}). Fix or "
            "uninstall the package"
        ) from error
    if not isinstance(entry, kind):
        raise UsageError(f"{added}, which is {entry!r}; it should be a {kind.__name__}")
    return entry
