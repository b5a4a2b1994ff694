"""Settings in a file (`--config job.toml`): options by their names, checked where they stand.

An earlier run's `run.json` is such a file, too: its settings and its recipe's arguments.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Literal, Union, cast, get_args, get_origin

from paceline.errors import UsageError
from paceline.files import describe_json, read_json_object, why_unreadable
from paceline.options.fields import (
    OptionField,
    OptionValue,
    fits,
    unknown_name,
)

CONFIG = OptionField(
    name="config",
    annotation=str | None,
    default=None,
    help="Read options from this file: TOML, with a line such as `lr = 0.1` for each, by the names "
    "that they have here; or an earlier run's run.json. What the environment or the command line "
    "says counts more.",
    group="Output",
)
PRINT_CONFIG = OptionField(
    name="print_config",
    annotation=bool,
    default=False,
    help="Print all settings as a file for --config, and start nothing.",
    group="Output",
)
_RECIPE = "recipe"
_OF_ONE_START = frozenset(
    "workers threads on progress rank world_size local_rank init_method interface".split()
)
"""Options in `run.json` of how a run was started, not of what was trained."""


@dataclass(frozen=True, kw_only=True)
class ConfigFile:
    """A file of settings, as it was read."""

    path: Path
    values: Mapping[str, object]
    """By names as they stand there."""
    text: str
    recipe: str | None = None
    """The recipe that it names."""
    script: str | None = None
    """The script that it is of: its whole path."""
    script_args: tuple[str, ...] = ()
    """The script's own arguments."""
    is_run: bool = False
    """Whether it is a `run.json`: what it has besides its differences from the defaults is left."""

    def where(self, name: str) -> str:
        """Say where a name stands, as compilers do: `job.toml:3`."""
        pattern = rf"""^\s*\[?["']?{re.escape(name)}["']?\s*[=:\].]"""
        match = re.search(pattern, self.text, re.MULTILINE)
        line = self.text.count("\n", 0, match.start()) + 1 if match else 1
        if match:  # the pattern may have begun with the end of lines before
            line += match[0].count("\n")
        return f"{self.path}:{line}"


def read_config(path: str) -> ConfigFile:
    """Read a file of settings.

    Raises:
        UsageError: It isn't there, or is something else.
    """
    import tomllib  # few commands have such a file

    file = Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8")
        if text.lstrip().startswith("{"):
            return _of_run(file, text)
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"--config {file} isn't TOML: {error}") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"--config {file} can't be read: {why_unreadable(error)}") from error
    recipe = content.pop(_RECIPE, None)
    config = ConfigFile(path=file, values=content, text=text, recipe=cast("str | None", recipe))
    if not isinstance(recipe, str | None):
        raise UsageError(f"{config.where(_RECIPE)}: recipe is {describe_json(recipe)}, not text")
    return config


def _of_run(file: Path, text: str) -> ConfigFile:
    content = read_json_object(file)
    settings, arguments = content.get("settings"), content.get("recipe_arguments")
    if not isinstance(settings, dict) or not isinstance(arguments, dict):
        raise ValueError("it is JSON, but no run.json; settings of your own are written in TOML")
    kept = {n: v for n, v in settings.items() if n not in _OF_ONE_START}
    derived = content.get("derived")
    if isinstance(derived, dict) and derived.get("global_batch"):
        kept |= {"global_batch": derived["global_batch"], "batch_per_worker": None}
    config = ConfigFile(path=file, values=kept | arguments, text=text, is_run=True)
    named, reference = str(content.get("recipe")), str(content.get("reference"))
    if content.get("kind", "recipe") == "recipe":
        # A file's is its whole path: it may be named from another directory.
        return replace(config, recipe=reference if ":" in named else named)
    own = content.get("script_args")
    words = tuple(map(str, own)) if isinstance(own, list) else ()
    return replace(config, script=reference, script_args=words)


def without_settled(
    config: ConfigFile, options: Iterable[OptionField], settled: Collection[str]
) -> tuple[ConfigFile, list[str]]:
    """Leave out of a file what a command settles itself, unless the value is fit for that command.

    Args:
        config: The file; it may have been written for `paceline train`.
        options: The command's; `workers`, for example, may be several numbers there, as text.

    Returns:
        The file without them, and where they stand: not of a `run.json`, which has all options.
    """
    own = {option.name: option.annotation for option in options}

    def is_idle(name: str, value: object) -> bool:
        """Say whether the command settles the name itself, and has no use for the value."""
        return name in settled and not (name in own and fits(_as_tuple(value), own[name]))

    idle = {n for n, value in config.values.items() if is_idle(n.replace("-", "_"), value)}
    kept = {name: value for name, value in config.values.items() if name not in idle}
    places = (
        [] if config.is_run else [f"{config.where(n)}: {n}" for n in config.values if n in idle]
    )
    return replace(config, values=kept), places


def check_config(
    config: ConfigFile, options: Iterable[OptionField]
) -> dict[str, tuple[str, Sequence[str]]]:
    """Check a file's settings against the options that there are.

    Args:
        options: What is known, with the defaults that count where nobody says anything.

    Returns:
        For each option that is given, by its Python name, where it stands, and its value as the
        words that a command line would have.

    Raises:
        UsageError: A name is unknown or there twice, or a value is of another type.
    """
    listed = {option.name: option for option in options}
    settings: dict[str, tuple[str, Sequence[str]]] = {}
    for name, value in config.values.items():
        own = name.replace("-", "_")
        if own not in listed and config.script is not None:
            continue  # what only recipes have: it stands there with its default
        if own not in listed or own in (CONFIG.name, PRINT_CONFIG.name):
            raise UsageError(f"{config.where(name)}: {_unknown(name, value, listed)}")
        if own in settings:
            raise UsageError(f"{config.where(name)}: {name} is given before: {settings[own][0]}")
        option = listed[own]
        if config.is_run and _as_tuple(value) == option.default:
            continue
        try:
            settings[own] = (config.where(name), _words_of(value, option))
        except ValueError as error:
            raise UsageError(f"{config.where(name)}: {name} is {error}") from None
    return settings


def _unknown(name: str, value: object, names: Iterable[str]) -> str:
    if isinstance(value, dict):
        return f"[{name}] is a table; settings stand alone, a line such as `lr = 0.1` for each"
    shown = [known.replace("_", "-") for known in names]
    return unknown_name(name, shown, "setting", all_in="--help-all lists all")


def _words_of(value: object, option: OptionField) -> Sequence[str]:
    """Write a value as words of a command line.

    Raises:
        ValueError: It is of another type than the option's; the message says both.
    """
    given = _as_tuple(value)
    is_none = given is None or given == "none"
    # A number may stand for text, such as a time without its unit: read as on a command line.
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    is_read = is_none or (is_number and fits(str(given), option.annotation))
    if not is_read and option.is_own and not fits(given, option.annotation):
        raise ValueError(f"{_shown(value)}; it should be {_kind(option.annotation)}")
    if isinstance(value, dict):
        raise ValueError("a table; it should be a value")
    parts = given if isinstance(given, tuple) else (given,)
    return [_word(part) for part in parts]


_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def _kind(annotation: object) -> str:
    """Say in words what a value has to be."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return " or ".join(_kind(part) for part in parts if part is not NoneType)
    if origin is Literal:
        return f"one of {', '.join(map(str, parts))}"
    if origin is tuple and parts[-1] is Ellipsis:
        return "a list of text"
    if origin is tuple:
        return f"a list of {len(parts)} numbers"
    return next((words for kind, words in _KINDS.items() if kind is annotation), str(annotation))


def _word(value: object) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _shown(value: object) -> str:
    if isinstance(value, str):
        return f"text ({value!r})"
    return str(value).lower() if isinstance(value, bool) else describe_json(value)


def as_toml(name: str, value: OptionValue) -> str:
    """Write a setting as a line that `read_config` reads again."""
    return f"{name.replace('_', '-')} = {_toml(value)}"


def _toml(value: object) -> str:
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool | int | float) and value is not None:
        return json.dumps(value)
    return json.dumps("none" if value is None else str(value), ensure_ascii=False)
