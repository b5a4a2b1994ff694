"""What a command trains, as its command line names it: a recipe, or a script of the user's."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar, final

from paceline.cli.commands.train import file_name
from paceline.errors import UsageError
from paceline.options.command_line import (
    parse_options,
    part_script_args,
    refuse_script_args,
    take_word,
)
from paceline.options.command_line import with_defaults as shown_with
from paceline.options.fields import OptionField, OptionValue, pick
from paceline.recipes.registry import reference_of
from paceline.runtime.script_options import script_options
from paceline.training.config import training_options
from paceline.training.recipe import Recipe, load_recipe

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
            tokens: After the command's name.
            usage: Of the command, for an error.
            what: The command needs, such as "what to measure".

        Raises:
            UsageError: There is no such recipe, or the command line names nothing.
        """
        own, script_args = part_script_args(tokens)
        name, own = take_word(own, usage, what)
        recipe = None if name.endswith(".py") else load_recipe(reference_of(name))
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

    def check(self) -> None:
        """Refuse a script that isn't there, and a script's arguments for a recipe.

        Raises:
            UsageError: It is so.
        """
        if self.is_script and not Path(self.name).expanduser().is_file():
            raise UsageError(f"there is no file {self.name}")
        refuse_script_args(() if self.is_script else self.script_args)


def list_training_options(
    recipe: Recipe | None, *, is_script: bool, without: Collection[str]
) -> list[OptionField]:
    """List the options of the training that a command starts.

    Args:
        recipe: Whose arguments and defaults are shown, if it is known.
        is_script: Whether the training is a script, which has fewer.
        without: Names of those that the command settles.
    """
    every = script_options() if is_script else training_options()
    options = {name: option for name, option in every.items() if name not in without}
    if recipe is None:
        return list(options.values())
    return [*recipe.arguments(), *shown_with(options, recipe.settings)]


def parse_with_own(
    kind: type[Own], command: str, about: str, tokens: Sequence[str], listed: Sequence[OptionField]
) -> tuple[Own, dict[str, OptionValue]]:
    """Read a command's options apart from those of the training that it starts.

    Args:
        kind: Dataclass of the command's own options.
        command: Name to show, for example `paceline scale digits`.
        about: What `--help` says first.
        tokens: The command's own words.
        listed: All options that it takes.

    Returns:
        Its own options, and those of the training that were given.

    Raises:
        UsageError: Something unknown or unreadable was given.
    """
    given = parse_options(command, about, tokens, listed)
    own = {"config", *(field.name for field in fields(kind))}  # type: ignore[arg-type]  # a dataclass
    return pick(kind, given), {name: value for name, value in given.items() if name not in own}
