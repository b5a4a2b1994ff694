"""What a command trains, as its command line names it: a recipe, or a script of the user's."""

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TypeVar, final

from paceline.distributed.environment import read_environment
from paceline.errors import UsageError
from paceline.options.command_line import (
    GivenOptions,
    flag,
    names_something,
    part_script_args,
    read_options,
    refuse_script_args,
    take_word,
    wants_help,
)
from paceline.options.command_line import with_defaults as shown_with
from paceline.options.config_file import CONFIG, ConfigFile, read_config
from paceline.options.fields import OptionField, OptionValue, pick
from paceline.options.shell import command_line
from paceline.recipes.registry import reference_of
from paceline.runtime.script_options import script_options
from paceline.training.config import merge, training_options
from paceline.training.recipe import Recipe, absolute_reference, load_recipe

Own = TypeVar("Own")


@final
@dataclass(frozen=True, kw_only=True)
class Target:
    """A recipe or a script, and what stands after its name."""

    name: str
    """As the user gives it."""
    recipe: Recipe | None
    """None: it is a script."""
    own: tuple[str, ...]
    """The command's own words."""
    script_args: tuple[str, ...]
    """What stands after `--`."""

    @classmethod
    def read(cls, tokens: Sequence[str], usage: str, what: str) -> "Target":
        """Read a command line.

        Args:
            what: The command needs, such as "what to measure".

        Raises:
            UsageError: There is no such recipe, or the command line names nothing.
        """
        own, script_args = part_script_args(tokens)
        if (of_run := _take_script_of_run(tokens)) is not None:
            name, script_args = of_run
        else:
            name, own = take_target(own, usage, what)
        is_script = of_run is not None or name.endswith(".py")
        recipe = None if is_script else load_recipe(reference_of(name))
        return cls(name=name, recipe=recipe, own=tuple(own), script_args=tuple(script_args))

    @property
    def is_script(self) -> bool:
        """Whether it is a script."""
        return self.recipe is None

    @property
    def settings(self) -> Mapping[str, OptionValue]:
        """Options of training that the recipe sets."""
        return self.recipe.settings if self.recipe else {}

    @property
    def file_name(self) -> str:
        """Its name, fit for a file's."""
        return file_name(Path(self.name).stem if self.is_script else self.name)

    def hint(self, command: str) -> str:
        """Return `script_hint` of a script, nothing of a recipe."""
        return script_hint(command) if self.is_script else ""

    def check(self) -> None:
        """Refuse a script that isn't there, and a script's arguments for a recipe.

        Raises:
            UsageError: It is so.
        """
        if self.is_script and not Path(self.name).expanduser().is_file():
            raise UsageError(f"there is no file {self.name}")
        refuse_script_args(() if self.is_script else self.script_args)


NOT_OF_TRIALS = frozenset(
    "name tag note copy_to copy_wait_s tracker tracker_project "
    "max_restarts on rank world_size local_rank init_method".split()
)
"""Options of training that name a run or show it elsewhere, or say where it is one of several
nodes: trials are no runs of the user's, and their workers are started by the command."""


def take_target(
    tokens: Sequence[str], usage: str, what: str, default: str | None = None
) -> tuple[str, Sequence[str]]:
    """Take a recipe or a script off a command line, else out of the file of its `--config`.

    Args:
        what: The command needs, such as "what to measure".
        default: The recipe where nothing names one.

    Returns:
        Its name, and the other words.

    Raises:
        UsageError: Nothing names it, or the file another one.
    """
    config = config_named(tokens)
    in_file = config.recipe if config else None
    if not names_something(tokens) and (in_file or default):
        if config is not None and config.script is not None:
            again = command_line("run", "--config", str(config.path))
            raise UsageError(
                f"--config {config.path} is of the script {config.script}: {again} runs it again"
            )
        return in_file or str(default), tokens
    name, rest = take_word(tokens, usage, what)
    recipe = None if name.endswith(".py") else name
    refuse_another(f"the command names {name}", recipe, config)
    return name, rest


def script_hint(command: str) -> str:
    """Write where a script's own arguments stand, behind an error in a command's options."""
    return f". Arguments of the script itself come after --: {command} -- ..."


def _take_script_of_run(tokens: Sequence[str]) -> tuple[str, tuple[str, ...]] | None:
    """Take a script out of the `run.json` of `--config`, where the command line names nothing.

    Returns:
        Its path, and its arguments: those after `--` where there are any, else the run's. None
        where there is no such file, or the command line names what to train.

    Raises:
        UsageError: The file can't be read, or its script is gone.
    """
    own, given = part_script_args(tokens)
    config = config_named(own)
    if config is None or config.script is None or names_something(own):
        return None
    return script_of(config), given if "--" in tokens else config.script_args


def script_of(config: ConfigFile) -> str:
    """Give the path of the script whose `run.json` a file is.

    Raises:
        UsageError: It is gone.
    """
    if config.script is None or not Path(config.script).is_file():
        raise UsageError(f"there is no file {config.script}, the script of {config.path}")
    return config.script


def refuse_another(trained: str, recipe: str | None, config: ConfigFile | None) -> None:
    """Refuse a file of settings that is for another recipe than what is trained.

    Args:
        trained: What is trained instead, as the error says it.
        recipe: Its recipe; None for a script.

    Raises:
        UsageError: It is.
    """
    if config is None or config.recipe is None:
        return
    # A run.json has the whole path of a recipe's file.
    if recipe is None or _whole_reference(config.recipe) != _whole_reference(recipe):
        raise UsageError(
            f"--config {config.path} is for the recipe {config.recipe}, and {trained}: take one of "
            "them out"
        )


def _whole_reference(name: str) -> str:
    return absolute_reference(reference_of(name))


def config_named(tokens: Sequence[str]) -> ConfigFile | None:
    """Read the file of `--config`, or of PACELINE_CONFIG, where there is one.

    Raises:
        UsageError: The file can't be read, or is the `run.json` of a script.
    """
    if wants_help(tokens):
        return None
    path = read_environment().get("PACELINE_CONFIG", "")
    for place, token in enumerate(tokens):
        option, _, text = token.partition("=")
        if option == flag(CONFIG.name):
            path = text or " ".join(tokens[place + 1 : place + 2])
    return read_config(path) if path else None


def file_name(name: str) -> str:
    """Turn a recipe's name into part of a directory's name."""
    stem = name.rpartition("/")[2].replace(".py:", "-")
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in stem)


def merge_layers(
    options: Mapping[str, OptionValue],
    of_file: Container[str],
    recipe_settings: Mapping[str, OptionValue],
) -> dict[str, OptionValue]:
    """Put what was typed over the settings of a file, and both over the recipe's.

    Of options that exclude each other (`global_batch`, `batch_per_worker`) the upper one stays.
    """
    filed = {name: value for name, value in options.items() if name in of_file}
    typed = {name: value for name, value in options.items() if name not in of_file}
    return merge(typed, merge(filed, recipe_settings))


def list_training_options(
    recipe: Recipe | None, *, is_script: bool, without: Collection[str]
) -> list[OptionField]:
    """List the options of the training that a command starts.

    Args:
        recipe: Whose arguments and defaults are shown, if it is known.
        is_script: Whether the training is a script, which has fewer.
    """
    every = script_options() if is_script else training_options()
    options = {name: option for name, option in every.items() if name not in without}
    if recipe is None:
        return list(options.values())
    return [*recipe.arguments(), *shown_with(options, recipe.settings)]


def parse_with_own(
    kind: type[Own],
    command: str,
    about: str,
    tokens: Sequence[str],
    listed: Sequence[OptionField],
    settled: Collection[str],
    hint: str = "",
) -> tuple[Own, GivenOptions]:
    """Read a command's options apart from those of the training that it starts.

    Args:
        command: Name to show, for example `paceline scale digits`.
        hint: For an error.

    Returns:
        Its own options, and those of the training that were given.

    Raises:
        UsageError: Something unknown or unreadable was given.
    """
    parsed = read_options(command, about, tokens, listed, hint, settled)
    own = {CONFIG.name, *(field.name for field in fields(kind))}  # type: ignore[arg-type]  # a dataclass
    training = {name: value for name, value in parsed.values.items() if name not in own}
    given = merge_layers(training, parsed.of_file(), {})
    return pick(kind, parsed.values), replace(parsed, values=given)
