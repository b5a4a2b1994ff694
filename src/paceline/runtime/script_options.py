"""What a script and the command line say about a training, put together."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from paceline.distributed.environment import detect_launchers, read_environment
from paceline.errors import UsageError
from paceline.options.command_line import flag, misspelt_variables, note, read_options
from paceline.options.fields import OptionField, OptionValue, unknown_name
from paceline.options.figures import listed as in_words
from paceline.training.config import OF_RECIPES, shown_name, training_options

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

    Not those of optimizer, learning rate and loss: these the script makes itself. And no aliases:
    `--batch-size` would most likely be meant for the script. Of those that its own calls
    may settle, the help says so in the place of a default.
    """
    options = {
        name: replace(option, aliases=())
        for name, option in training_options().items()
        if name not in OF_RECIPES
    }
    return options | {
        name: replace(options[name], shows_default=False, help=text)
        for name, text in _OF_THE_LOOP.items()
    }


def refuse_of_recipes(tokens: Iterable[str], hint: str) -> None:
    """Refuse options that recipes alone have, and other names of options: a script may mean both.

    Args:
        tokens: The command line, without the script's arguments.
        hint: Where the script's own arguments go.

    Raises:
        UsageError: One of them was given.
    """
    own = {flag(name) for option in script_options().values() for name in option.own_names}
    for token in tokens:
        given = token.partition("=")[0]
        # Values, as of --allow-change, may be names of options.
        meant = _meant_by(given) if given.startswith("-") and given not in own else []
        if meant:
            raise UsageError(f"unknown option {given!r}: {_why(meant, flag)}. {hint}")


def _meant_by(given: str) -> list[str]:
    """Name the options of a training that have this name or flag, also as another name."""
    name = flag(given.lstrip("-"))
    options = training_options().items()
    return [n for n, o in options if name in map(flag, (*o.own_names, *o.aliases))]


def _why(meant: Sequence[str], write: Callable[[str], str]) -> str:
    """Say why a name isn't one for a script, and what is."""
    if meant[0] in OF_RECIPES:
        return _WHY_NOT
    return f"Paceline's own is {in_words(list(map(write, meant)), 'or')}"


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
        if name not in known and (meant := _meant_by(name)):
            why = _why(meant, str)
            raise UsageError(f"paceline.session(): unknown option {name!r}: {why}")
        if name not in known:
            every = "`paceline run --help-all` lists all"
            unknown = unknown_name(name, known, "option", all_in=every)
            raise UsageError(f"paceline.session(): {unknown}")
    for name, value in script.items():
        if name in given and given[name] != value and name != "progress":  # `-q` switches it off
            raise UsageError(
                f"the script says {name}={value!r}, and the command line or the environment says "
                f"{flag(shown_name(name))} {given[name]}: leave it out in one of the two places, "
                "or put what is meant for the script after --"
            )
    return {**script, **given}
