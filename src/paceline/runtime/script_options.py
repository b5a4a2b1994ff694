"""What a script and the command line say about a training, put together."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from paceline.distributed.environment import detect_launchers, read_environment
from paceline.errors import UsageError
from paceline.options.command_line import flag, misspelt_variables, note, read_options
from paceline.options.fields import OptionField, OptionValue, unknown_name
from paceline.training.config import OF_RECIPES, training_options

_WHY_NOT = "a script chooses its optimizer, learning rate and loss itself"

_OF_THE_LOOP = {
    "epochs": "Passes over the training set. Default: what the script's s.epochs(...) says, else "
    "10.",
    "drop_last": "Leave out the short batch at the end of an epoch. Default: what the script's "
    "loader says; else it is used, weighted exactly.",
}
"""Options whose default a script's own calls say, with their help, which then shows no other."""


def script_options() -> Mapping[str, OptionField]:
    """Options of a training that a script of one's own has as well.

    Not those of optimizer, learning rate and loss: these the script makes itself. Of those
    that its own calls may settle, the help says so in the place of a default.
    """
    options = {
        name: option for name, option in training_options().items() if name not in OF_RECIPES
    }
    return options | {
        name: replace(options[name], shows_default=False, help=text)
        for name, text in _OF_THE_LOOP.items()
    }


def refuse_of_recipes(tokens: Iterable[str], hint: str) -> None:
    """Refuse options that recipes alone have: a script may have its own of that name.

    Args:
        tokens: The command line, without the script's arguments.
        hint: Where the script's own arguments go.

    Raises:
        UsageError: One of them was given.
    """
    refused = set(map(flag, OF_RECIPES))
    for token in tokens:
        given = token.partition("=")[0]
        if given in refused:
            raise UsageError(f"unknown option {given!r}: {_WHY_NOT}. {hint}")


def warn_of_variables(options: Iterable[OptionField], *, is_script: bool = False) -> None:
    """Say which variables of the environment look like settings of a training and set nothing.

    Of several workers that were started one by one the first says it.

    Args:
        is_script: It is a script's training, which has no settings of recipes.
    """
    environment = read_environment()
    if any(placement.rank for placement in detect_launchers(environment).workers):
        return
    lines = misspelt_variables(environment, options)
    for name in sorted(OF_RECIPES) if is_script else ():
        if f"PACELINE_{name.upper()}" in environment:
            lines.append(f"PACELINE_{name.upper()} sets nothing: {_WHY_NOT}")
    for line in lines:
        note(line)


def from_environment() -> dict[str, OptionValue]:
    """Read the options that stand in the environment, such as PACELINE_PRECISION."""
    warn_of_variables(training_options().values(), is_script=True)
    return read_options("the environment", "", (), script_options().values()).values


def settled(
    script: Mapping[str, OptionValue], given: Mapping[str, OptionValue]
) -> dict[str, OptionValue]:
    """Put what the script says and what was given from outside together.

    Raises:
        UsageError: They disagree, or the script names an option that there isn't.
    """
    known = script_options()
    for name in script:
        if name in OF_RECIPES:
            raise UsageError(f"paceline.session(): unknown option {name!r}: {_WHY_NOT}")
        if name not in known:
            every = "`paceline run --help-all` lists all"
            unknown = unknown_name(name, known, "option", all_in=every)
            raise UsageError(f"paceline.session(): {unknown}")
    for name, value in script.items():
        if (
            name in given and given[name] != value and name != "progress"
        ):  # `--quiet` switches it off
            raise UsageError(
                f"the script says {name}={value!r}, and the command line or the environment says "
                f"{flag(name)} {given[name]}: leave it out in one of the two places, "
                "or put what is meant for the script after --"
            )
    return {**script, **given}
