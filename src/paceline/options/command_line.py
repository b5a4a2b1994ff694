"""Command lines made from option fields: parsing, `--help`, and errors that list what is known."""

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import GenericAlias, UnionType
from typing import Annotated, NoReturn, Union, cast, final, get_args, get_origin

from cyclopts import App, Group, Parameter
from cyclopts.config import Env
from cyclopts.exceptions import (
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from paceline.errors import HelpShown, UsageError
from paceline.options.fields import OptionField, OptionValue, check_values, unknown_name
from paceline.options.text import printable


@final
class _WholeNumber(int):
    """What cyclopts makes of a token in place of `int`: its own conversion rounds `1.5` to 2."""


_WholeNumber.__name__ = "int"  # as which `--help` and errors show it


def strict(annotation: object) -> object:
    """Replace `int` wherever it stands in an annotation, so that `1.5` isn't taken for it."""
    if annotation is int:
        return _WholeNumber
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return Annotated[strict(parts[0]), *parts[1:]]
    if origin in (Union, UnionType):
        return Union[tuple(strict(part) for part in parts)]  # noqa: UP007  # made of a tuple
    if origin is tuple:
        return GenericAlias(tuple, tuple(strict(part) for part in parts))
    return annotation


def plain(value: OptionValue) -> OptionValue:
    """Give what was read by a strict annotation as ordinary numbers."""
    if isinstance(value, _WholeNumber):
        return int(value)
    if type(value) is tuple:
        return tuple(plain(cast(OptionValue, item)) for item in value)
    return value


_ENVIRONMENT_PREFIX = "PACELINE_"
_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}


def parse_options(
    command: str,
    about: str,
    tokens: Sequence[str],
    options: Iterable[OptionField],
    hint: str = "",
) -> dict[str, OptionValue]:
    """Read options from a command line, and from the environment where it doesn't name them.

    Args:
        command: Name to show, for example `paceline train digits`.
        about: What `--help` says first.
        tokens: The command line after the command.
        options: What is known; `default` is only shown.
        hint: What an error about something unknown says besides.

    Returns:
        The options that were given, by name; not the defaults.

    Raises:
        HelpShown: Help was asked for and printed.
        UsageError: Something unknown or unreadable was given.
    """
    listed = list(options)
    # cyclopts reads options from a function's signature: one is made for those that are listed.
    app = App(name=command, help=about, help_flags=["--help", "-h"], version_flags=[])
    app.config = Env(_ENVIRONMENT_PREFIX, command=False)
    app.default(_callable_with(listed))
    if any(token in ("--help", "-h") for token in tokens):
        app.help_print([])
        raise HelpShown
    try:
        _, bound, _ = app.parse_args(list(tokens), exit_on_error=False, print_error=False)
    # Its errors name its own types and functions: said again in the user's words.
    except UnknownOptionError as error:
        raise UsageError(_unknown_option(error, listed, command) + hint) from error
    except UnusedCliTokensError as error:
        what = _unexpected(error, tokens, listed)
        raise UsageError(f"{what}. See {command} --help{hint}") from error
    except CycloptsError as error:
        raise UsageError(f"{_what_is_wrong(error, tokens, listed)} See {command} --help") from error
    values = {name: plain(value) for name, value in bound.arguments.items()}
    check_values(values, {option.name for option in listed if option.is_own})
    return values


def snapshot_option(group: str) -> OptionField:
    """The option of commands that work on one snapshot of a run."""
    return OptionField(
        name="snapshot",
        annotation=str,
        default="best",
        help="Which model: best (by validation), last, or a snapshot's directory.",
        group=group,
    )


def flag(name: str) -> str:
    """Write an option's name as a flag."""
    return f"--{name.replace('_', '-')}"


def with_defaults(
    options: Mapping[str, OptionField], defaults: Mapping[str, OptionValue]
) -> list[OptionField]:
    """Show other defaults in `--help`, a recipe's."""
    return [
        OptionField(
            name=option.name,
            annotation=option.annotation,
            default=defaults.get(option.name, option.default),
            help=option.help,
            group=option.group,
            is_own=option.is_own,
        )
        for option in options.values()
    ]


def _callable_with(options: Sequence[OptionField]) -> Callable[..., None]:
    groups = {option.group: Group.create_ordered(option.group) for option in options}

    def command(**given: OptionValue) -> None:
        """Stand for the options; never called."""

    parameters = [
        inspect.Parameter(
            option.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=option.default,
            annotation=Annotated[
                strict(option.annotation),
                Parameter(help=option.help, group=groups[option.group], show_env_var=False),
            ],
        )
        for option in options
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def _unknown_option(error: UnknownOptionError, options: Sequence[OptionField], command: str) -> str:
    given = str(error.token.keyword or error.token.value) if error.token else "?"
    text = unknown_name(given, [flag(option.name) for option in options], "option")
    return f"{text}. See {command} --help"


def _what_is_wrong(
    error: CycloptsError, tokens: Sequence[str], options: Sequence[OptionField]
) -> str:
    """Say what was given, and what was expected: cyclopts names its own conversion instead."""
    if isinstance(error, MissingArgumentError) and error.keyword:
        return _without_value(error, error.keyword, tokens, options)
    if isinstance(error, CoercionError) and error.token is not None and not error.msg:
        given = error.token.keyword or (error.argument.name if error.argument else "a value")
        wanted = _KINDS.get(getattr(error.target_type, "__name__", ""))
        if wanted is not None:
            return f"{given} is {error.token.value!r}; it must be {wanted}."
    text = " ".join(str(error).split())
    return text if text.endswith((".", "?")) else f"{text}."


def _without_value(
    error: MissingArgumentError, given: str, tokens: Sequence[str], options: Sequence[OptionField]
) -> str:
    annotation = next((o.annotation for o in options if flag(o.name) == given), None)
    # An option with several values has a tuple somewhere in its annotation.
    pairs = [part for part in (annotation, *get_args(annotation)) if get_origin(part) is tuple]
    several = len(get_args(pairs[0])) if pairs else 1
    if several > 1 and error.tokens_so_far:
        got = len(error.tokens_so_far)
        return f"{given} takes {several} values, with a space between them, and has {got}."
    place = list(tokens).index(given) + 1 if given in tokens else len(tokens)
    if place < len(tokens):
        return (
            f"{given} has no value: {tokens[place]!r} after it begins with a dash, as options do. "
            f"If that is the value, write {given}={tokens[place]}"
            f"{'' if tokens[place].endswith('.') else '.'}"
        )
    return f"{given} has no value."


def _unexpected(
    error: UnusedCliTokensError, tokens: Sequence[str], options: Sequence[OptionField]
) -> str:
    words = list(error.unused_tokens or ())
    switches = {flag(o.name) for o in options if bool in (o.annotation, *get_args(o.annotation))}
    place = list(tokens).index(words[0]) if words and words[0] in tokens else 0
    before = tokens[place - 1] if place else ""
    if before.replace("--no-", "--", 1) in switches:
        name = before.replace("--no-", "--", 1)
        return (
            f"{before} takes no value, and {words[0]!r} comes after it: {name} switches on, "
            f"{name.replace('--', '--no-', 1)} switches off"
        )
    if before.isdigit() and all(word.isdigit() for word in words) and place > 1:
        option, value = tokens[place - 2], ",".join((before, *words))
        return f"unexpected {words[0]!r}: put commas between several numbers, {option} {value}"
    listed = ", ".join(map(repr, words))
    return f"unexpected {listed}: what isn't an option comes first"


def take_word(tokens: Sequence[str], usage: str, what: str) -> tuple[str, Sequence[str]]:
    """Take a positional argument off a command line.

    Raises:
        UsageError: An option stands there, or nothing.
    """
    if not tokens or tokens[0].startswith("-"):
        raise UsageError(f"{what} is missing. Usage: {usage} [options]")
    return tokens[0], tokens[1:]


def take_option(tokens: Sequence[str], name: str) -> tuple[str | None, list[str]]:
    """Take an option with a value off a command line, where it is needed before the others.

    Args:
        tokens: The command line.
        name: The option, with its dashes.

    Returns:
        Its last value, None where it isn't given; and the other words.

    Raises:
        UsageError: It has no value.
    """
    value, rest, left = None, [], iter(tokens)
    for token in left:
        given, is_joined, joined = token.partition("=")
        if given != name:
            rest.append(token)
            continue
        value = joined if is_joined else next(left, "")
        if not value:
            raise UsageError(f"{name} has no value.")
    return value, rest


def part_script_args(tokens: Sequence[str]) -> tuple[Sequence[str], tuple[str, ...]]:
    """Part Paceline's own words from a script's arguments, which come after `--`."""
    place = list(tokens).index("--") if "--" in tokens else len(tokens)
    return tokens[:place], tuple(tokens[place + 1 :])


def show_help(command: str, about: str, options: Iterable[OptionField]) -> NoReturn:
    """Print a command's help.

    Raises:
        HelpShown: Always; the command is over.
    """
    parse_options(command, about, ["--help"], options)
    raise HelpShown


def read_command(
    usage: str, about: str, tokens: Sequence[str], options: Iterable[OptionField], *words: str
) -> tuple[list[str], dict[str, OptionValue]]:
    """Read the positional arguments of a command, and its options.

    Args:
        usage: Name to show, for example `paceline export RUN_DIR FILE`.
        about: What `--help` says first.
        tokens: The command line after the command.
        options: As for `parse_options`.
        words: What each positional argument is, for the error where it is missing.

    Raises:
        HelpShown: Help was asked for and printed.
        UsageError: Something is missing, unknown or unreadable.
    """
    if wants_help(tokens):
        show_help(usage, about, options)
    given = []
    for what in words:
        word, tokens = take_word(tokens, usage, what)
        given.append(word)
    return given, parse_options(usage, about, tokens, options)


def note(line: str) -> None:
    """Say on standard error what the user should know beside a command's result."""
    print(printable(line), file=sys.stderr, flush=True)


def wants_help(tokens: Sequence[str]) -> bool:
    """Tell whether `--help` stands anywhere on a command line."""
    return any(token in ("--help", "-h") for token in tokens)


def words(given: Mapping[str, OptionValue]) -> list[str]:
    """Write options as the words of a command line."""
    return [word for name, value in given.items() for word in _words(name, value)]


def _words(name: str, value: OptionValue) -> Iterable[str]:
    if isinstance(value, bool):
        yield flag(name) if value else flag(f"no_{name}")
    elif isinstance(value, tuple | list):
        for item in value:
            yield from (flag(name), str(item))
    elif value is not None:
        text = str(value)
        yield from (f"{flag(name)}={text}",) if text.startswith("-") else (flag(name), text)
