"""Writes reference/options.md and script/settings.py from the option dataclasses.

$ python docs/generate_options.py
"""

import json
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Literal, Union, get_args, get_origin

from paceline.cli.cluster_submit import cluster_options
from paceline.cli.commands.train import RUN_DIR
from paceline.optim.table import OPTIMIZERS
from paceline.options.command_line import flag
from paceline.options.fields import OptionField
from paceline.recipes.registry import BUILT_IN
from paceline.runtime.script_options import script_options
from paceline.training.config import training_options
from paceline.training.recipe import load_recipe

PAGE = Path(__file__).parent / "reference" / "options.md"
SETTINGS = Path(__file__).parents[1] / "src" / "paceline" / "script" / "settings.py"
_OPEN = ("sync", "on")
"""Other packages add to what these can be."""

_INTRODUCTION = """\
# Options

<!-- Written by generate_options.py from the option dataclasses; don't edit by hand. -->

All options of `paceline train`, in short; `paceline train RECIPE --help-all` says more, with the
recipe's own defaults. In Python (in `@paceline.recipe(...)`) and in `run.json` the same names are
written with underscores: `--global-batch` is `global_batch`. Switches take `--no-`:
`--no-drop-last`. An option that isn't given keeps the recipe's setting, else the default below. How
they work together: [training.md](training.md).
"""


_SETTINGS_INTRODUCTION = '''\
"""The options that a session takes as keywords, typed, so that editors complete them.

Written by docs/generate_options.py from the option dataclasses; don't edit by hand.
"""

from typing import Literal, TypedDict


class SessionSettings(TypedDict, total=False):
    """Options of training by their Python names; one that isn't given keeps its default.

    Flat, as keywords are: a key for each option of the dataclasses.
    """
'''


def render_settings() -> str:
    """Write the module of a session's keywords."""
    parts = [_SETTINGS_INTRODUCTION]
    for name, option in script_options().items():
        kind = "str | None" if name in _OPEN else _in_python(option.annotation)
        text = textwrap.fill(option.summary, 90)
        parts.append(textwrap.indent(f'{name}: {kind}\n"""{text}"""\n', "    "))
    return "\n".join(parts)


def _in_python(annotation: object) -> str:
    """Write a type as Python has it, None last."""
    if get_origin(annotation) in (Union, types.UnionType):
        members = sorted(get_args(annotation), key=lambda member: member is type(None))
        return " | ".join(map(_in_python, members))
    if get_origin(annotation) is Literal:
        return f"Literal[{', '.join(map(json.dumps, get_args(annotation)))}]"
    if annotation is type(None):
        return "None"
    return annotation.__name__ if type(annotation) is type else str(annotation)


def render() -> str:
    """Write the whole page."""
    parts = [_INTRODUCTION]
    options = [*training_options().values(), RUN_DIR, *cluster_options()]
    for group, members in groupby(sorted(options, key=_group_order(options)), key=_group):
        parts.append(f"## {group}\n\n" + _table(_OPTION_HEADER, map(_option_row, members)))
    parts.append(_optimizers())
    parts.append(_recipes())
    return "\n".join(parts)


_OPTION_HEADER = ("option", "value", "default", "meaning")


def _group(option: OptionField) -> str:
    return option.group


def _group_order(options: Sequence[OptionField]) -> Callable[[OptionField], int]:
    groups = list(dict.fromkeys(option.group for option in options))
    return lambda option: groups.index(option.group)


def _option_row(option: OptionField) -> Sequence[str]:
    return (
        f"`{flag(option.name)}`",
        _kind(option.annotation),
        _show(option.default),
        option.summary,
    )


def _kind(annotation: object) -> str:
    if get_origin(annotation) in (Union, types.UnionType):
        members = [member for member in get_args(annotation) if member is not type(None)]
        return " or ".join(_kind(member) for member in members)
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(annotation))
    if get_origin(annotation) is tuple:
        parts = get_args(annotation)
        if parts[-1] is Ellipsis:
            return f"{_kind(parts[0])}, repeatable"
        kinds = set(map(_kind, parts))
        plural = f"{kinds.pop()}s" if len(kinds) == 1 else "values"
        return f"{len(parts)} {plural}"
    names = {int: "whole number", float: "number", str: "text", bool: "switch"}
    return names[annotation] if isinstance(annotation, type) else str(annotation)


def _show(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(str(part) for part in value)
    return f"`{value}`"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def lines() -> Iterator[str]:
        for row in (header, ["---"] * len(header), *rows):
            yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"

    return "\n".join(lines()) + "\n"


def _optimizers() -> str:
    rows = []
    for name, entry in OPTIMIZERS.items():
        own = ", ".join(f"{flag(n)} {_plain(v)}" for n, v in entry.defaults.items())
        rows.append((f"`{name}`", f"`{entry.module}.{entry.class_name}`", own))
    text = "An option that the chosen optimizer doesn't have is an error, never ignored.\n\n"
    return (
        "## What each optimizer has\n\n"
        + text
        + _table(("optimizer", "class", "its options and their defaults"), rows)
    )


def _recipes() -> str:
    rows = []
    for name, reference in BUILT_IN.items():
        found = load_recipe(reference)
        settings = ", ".join(f"{flag(n)} {_plain(v)}" for n, v in found.settings.items())
        own = ", ".join(f"{flag(a.name)} {_plain(a.default)}" for a in found.arguments())
        rows.append((f"`{name}`", own, settings))
    return "## What each built-in recipe has and sets\n\n" + _table(
        ("recipe", "its own options and their defaults", "options of training that it sets"), rows
    )


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(str(part) for part in value)
    return str(value)


if __name__ == "__main__":
    PAGE.write_text(render())
    SETTINGS.write_text(render_settings())
