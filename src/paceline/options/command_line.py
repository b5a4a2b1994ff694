"""Command lines made from option fields: parsing, `--help`, and errors that list what is known."""

import inspect
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import GenericAlias, UnionType
from typing import Annotated, NoReturn, Union, cast, final, get_args, get_origin

from cyclopts import App, Group, Parameter, Token
from cyclopts.argument import ArgumentCollection
from cyclopts.config import Env
from cyclopts.exceptions import (
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    RepeatArgumentError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from paceline.errors import HelpShown, UsageError
from paceline.options.config_file import CONFIG, check_config, read_config, without_settled
from paceline.options.fields import (
    OptionField,
    OptionValue,
    check_values,
    closest_names,
    unknown_name,
)
from paceline.options.fields import flag as flag  # which commands take from here
from paceline.options.figures import listed as in_words
from paceline.options.text import fitting, printable


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
_HELP_ALL = "--help-all"
LIST_OPTIONS = "--list-options"
"""Has a command give its options instead of help: for completion in shells, not for users."""
_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}


@final
@dataclass(frozen=True)
class GivenOptions:
    """Options that were given, and where each was: command line, file or variable."""

    values: dict[str, OptionValue]
    """By name; not the defaults."""
    sources: Mapping[str, str]
    """`command line`, `environment`, or a file's line, by name."""

    def typed(self) -> set[str]:
        """Name those that the command line has, by whichever of their names."""
        return {name for name, where in self.sources.items() if where == ON_COMMAND_LINE}

    @contextmanager
    def placed(self) -> Iterator[None]:
        """Put before an error that begins with an option where that stands, unless it was typed.

        Raises:
            UsageError: As within the block.
        """
        try:
            yield
        except UsageError as error:
            first = re.match(r"--[\w-]+", str(error))
            name = first[0].lstrip("-").replace("-", "_") if first else ""
            where = self.sources.get(name, ON_COMMAND_LINE)
            if where == ON_COMMAND_LINE:
                raise
            place = _ENVIRONMENT_PREFIX + name.upper() if where == IN_ENVIRONMENT else where
            raise UsageError(f"{place}: {error}") from error

    def of_file(self) -> set[str]:
        """Name those that a file says: what is typed, or in the environment, counts before them."""
        return {name for name, where in self.sources.items() if where not in _SOURCES.values()}


def read_options(
    command: str,
    about: str,
    tokens: Sequence[str],
    options: Iterable[OptionField],
    hint: str = "",
    settled: Collection[str] = (),
) -> GivenOptions:
    """Read options from a command line, the environment and, with `--config`, a file.

    What counts most comes first: the command line, the environment, the file.

    Args:
        command: Name to show, for example `paceline train digits`.
        options: What is known; `default` is only shown.
        hint: For an error.
        settled: Names of options of training that the command settles itself. In a file, which may
            be for `paceline train` as well, they have no effect.

    Raises:
        HelpShown: Help was asked for and printed.
        UsageError: Something unknown or unreadable was given.
    """
    listed = list(options)
    if wants_help(tokens):
        show_help(command, about, listed, tokens)
    app = App(name=command, help_flags=[], version_flags=[])
    sources: dict[str, str] = {}
    app.config = (
        Env(_ENVIRONMENT_PREFIX, command=False),
        partial(_read_file, listed, settled),
        partial(_note_sources, sources),
    )
    app.default(callable_with(listed))
    try:
        _, bound, _ = app.parse_args(_joined(tokens), exit_on_error=False, print_error=False)
    # Its errors name its own types and functions: said again in the user's words.
    except UnknownOptionError as error:
        raise UsageError(_unknown_option(error, listed, command) + hint) from error
    except UnusedCliTokensError as error:
        what = _unexpected(error, tokens, listed)
        raise UsageError(f"{what}. See {command} --help{hint}") from error
    except CycloptsError as error:
        raise UsageError(f"{_what_is_wrong(error, tokens, listed)} See {command} --help") from error
    values = {name: plain(value) for name, value in bound.arguments.items()}
    given = GivenOptions(values, sources)
    with given.placed():
        check_values(values, {option.name for option in listed if option.is_own})
    return given


def _joined(tokens: Sequence[str]) -> list[str]:
    """Join values to their options that begin with a dash and have a space: no option has one."""
    words: list[str] = []
    for token in tokens:
        is_value = token.startswith("-") and len(token.partition("=")[0].split()) > 1
        if is_value and words and words[-1].startswith("--") and "=" not in words[-1]:
            words[-1] += f"={token}"
        else:
            words.append(token)
    return words


def _read_file(
    options: Sequence[OptionField],
    settled: Collection[str],
    app: App,
    commands: tuple[str, ...],
    arguments: ArgumentCollection,
) -> None:
    """Give what stands in the file that `--config` names to the options that have no value yet."""
    by_name = {argument.field_info.name: argument for argument in arguments}
    named = by_name.get(CONFIG.name)
    if named is None or not named.tokens:
        return
    config, idle = without_settled(read_config(named.tokens[-1].value), options, settled)
    for line in idle:
        note(f"{line} has no effect on {' '.join(app.name)}, which settles it")
    # What the command line or the environment has given counts before the file.
    settings = check_config(config, options)
    for name, (where, parts) in settings.items():
        if by_name[name].tokens:
            continue
        for place, part in enumerate(parts):
            token = Token(keyword=f"{where}: {name}", value=part, source=where, index=place)
            by_name[name].append(token)


ON_COMMAND_LINE, IN_ENVIRONMENT = "command line", "environment"
"""Where an option is from, if it isn't from a file."""
_SOURCES = {"cli": ON_COMMAND_LINE, "env": IN_ENVIRONMENT}


def _note_sources(
    sources: dict[str, str], app: App, commands: tuple[str, ...], arguments: ArgumentCollection
) -> None:
    """Note where each option is from, once all have been read."""
    for argument in arguments:
        for token in argument.tokens[:1]:
            sources[argument.field_info.name] = _SOURCES.get(token.source, token.source)


INTERNAL_VARIABLES = frozenset(
    "PACELINE_ATTEMPT PACELINE_FORK_SERVER_OF PACELINE_GUARD_FD PACELINE_GUARD_PID PACELINE_NODE "
    "PACELINE_PINNED_THREADS PACELINE_REQUEST PACELINE_SCRATCH PACELINE_STORE".split()
)
"""What Paceline's processes say to each other by; its tests have others, which begin with TEST_."""


def misspelt_variables(given: Iterable[str], options: Iterable[OptionField]) -> list[str]:
    """Say which environment variables set nothing although they look like a setting.

    Others that begin alike may be somebody else's, or another recipe's: nothing is said of them.

    Returns:
        A line for each.
    """
    # Names of variables that are read, each with the option's name.
    known = {f"{_ENVIRONMENT_PREFIX}{option.name.upper()}": option.name for option in options}
    lines = []
    for variable in sorted(given):
        name = variable.removeprefix(_ENVIRONMENT_PREFIX)
        ours = name == variable or variable in known or variable in INTERNAL_VARIABLES
        if ours or name.startswith(("NO_", "TEST_")):
            continue
        close = [f"{_ENVIRONMENT_PREFIX}{n.upper()}" for n in closest_names(name, known.values())]
        if close:
            lines.append(f"{variable} sets nothing: did you mean {in_words(close, 'or')}?")
    return lines


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of commands that take the weights of one snapshot of a run."""

    snapshot: str = "best"
    """Which model: best (by validation), last, or a snapshot's directory."""
    ema: bool = True
    """Take the moving average of the weights where the run has one (--ema); --no-ema takes those
    that were trained."""


def with_defaults(
    options: Mapping[str, OptionField], defaults: Mapping[str, OptionValue]
) -> list[OptionField]:
    """Show other defaults in `--help`, a recipe's."""
    return [
        replace(option, default=defaults[name], shows_default=True) if name in defaults else option
        for name, option in options.items()
    ]


def callable_with(options: Sequence[OptionField], *, brief: bool = False) -> Callable[..., None]:
    """Make a function whose signature cyclopts reads options from; it is never called.

    Args:
        brief: For help that says of a switch that is off only how it is switched on.
    """
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
                Parameter(
                    name=flag(option.name),
                    help=option.help,
                    group=groups[option.group],
                    show_env_var=False,
                    show_default=False if _is_silent(option, brief=brief) else None,
                    negative_bool=() if brief and option.default is False else None,
                    negative_iterable=(),
                ),
            ],
        )
        for option in options
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def _is_silent(option: OptionField, *, brief: bool) -> bool:
    """Tell whether help says nothing of a default."""
    is_empty = option.default == () or (brief and option.default is False)
    return is_empty or not option.shows_default


def _unknown_option(error: UnknownOptionError, options: Sequence[OptionField], command: str) -> str:
    given = str(error.token.keyword or error.token.value) if error.token else "?"
    flags = [flag(option.name) for option in options]
    text = unknown_name(given, flags, "option", all_in=f"{command} --help-all lists all")
    return text if text.endswith("lists all") else f"{text}. See {command} --help"


def _what_is_wrong(
    error: CycloptsError, tokens: Sequence[str], options: Sequence[OptionField]
) -> str:
    """Say what was given, and what was expected: cyclopts names its own conversion instead."""
    if isinstance(error, MissingArgumentError) and error.keyword:
        return _without_value(error, error.keyword, tokens, options)
    if isinstance(error, RepeatArgumentError):
        return f"{error.token.keyword} is given more than once."
    if isinstance(error, CoercionError) and error.token is not None and not error.msg:
        given = error.token.keyword or (error.argument.name if error.argument else "a value")
        wanted = _KINDS.get(getattr(error.target_type, "__name__", ""))
        if wanted is not None:
            return f"{given} is {error.token.value!r}; it must be {wanted}."
    text = " ".join(str(error).split())
    text = text if text.endswith((".", "?")) else f"{text}."
    token = error.token if isinstance(error, CoercionError) else None
    if token is None:
        return text
    # Cyclopts guesses more freely than this does for names: of gpu it says xpu.
    guess = _GUESS.search(text)
    if guess is not None and not closest_names(token.value, [guess[1]]):
        text = text.replace(guess[0], "")
    return text


_GUESS = re.compile(r' Did you mean "(.*)"\?$')


def _without_value(
    error: MissingArgumentError, given: str, tokens: Sequence[str], options: Sequence[OptionField]
) -> str:
    several = next((option.num_words for option in options if given == flag(option.name)), 1)
    if several > 1 and error.tokens_so_far:
        got = len(error.tokens_so_far)
        return f"{given} takes {several} values, with a space between them, and has {got}."
    place = list(tokens).index(given) + 1 if given in tokens else len(tokens)
    if place < len(tokens):
        return (
            f"{given} has no value: {tokens[place]!r} after it begins with a dash, as options do. "
            f"If that is the value, write {given}={shlex.quote(tokens[place])}"
            f"{'' if tokens[place].endswith('.') else '.'}"
        )
    return f"{given} has no value."


def _unexpected(
    error: UnusedCliTokensError, tokens: Sequence[str], options: Sequence[OptionField]
) -> str:
    words = list(error.unused_tokens or ())
    switches = {flag(option.name) for option in options if not option.num_words}
    place = list(tokens).index(words[0]) if words and words[0] in tokens else 0
    before = tokens[place - 1] if place else ""
    # A switch with a value: `--drop-last true`.
    if before.replace("--no-", "--", 1) in switches:
        name = before.replace("--no-", "--", 1)
        return (
            f"{before} takes no value, and {words[0]!r} comes after it: {name} switches on, "
            f"{name.replace('--', '--no-', 1)} switches off"
        )
    # Numbers with spaces between them: `--workers 1 2 4`.
    if before.isdigit() and all(word.isdigit() for word in words) and place > 1:
        option, value = tokens[place - 2], ",".join((before, *words))
        return f"unexpected {words[0]!r}: put commas between several numbers, {option} {value}"
    listed = ", ".join(map(repr, words))
    return f"unexpected {listed}: it is one word too many"


def take_word(tokens: Sequence[str], usage: str, what: str) -> tuple[str, Sequence[str]]:
    """Take a positional argument off a command line.

    Raises:
        UsageError: An option stands there, or nothing.
    """
    if not names_something(tokens):
        options = "" if "[" in usage else " [options]"
        raise UsageError(f"{what} is missing. Usage: {usage}{options}")
    return tokens[0], tokens[1:]


def names_something(tokens: Sequence[str]) -> bool:
    """Tell whether a command line begins with something else than an option."""
    return bool(tokens) and not tokens[0].startswith("-")


def take_option(tokens: Sequence[str], name: str) -> tuple[str | None, list[str]]:
    """Take an option with a value off a command line, where it is needed before the others.

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


def with_words_first(tokens: Sequence[str], options: Iterable[OptionField]) -> list[str]:
    """Move words that are neither options nor their values, such as a script, before the options.

    Args:
        tokens: A command line; what comes after `--` stays as it is.
        options: What is known; an unknown option has a value.
    """
    num_words = {flag(f"{no}{o.name}"): o.num_words for o in options for no in ("", "no_")}
    own, _ = part_script_args(tokens)
    words: list[str] = []
    given: list[str] = []
    left = 0  # words of the last option's value that are still to come
    for token in own:
        if token.startswith("-") and (left == 0 or token in num_words):
            left = 0 if "=" in token else num_words.get(token, 1)
            given.append(token)
        else:
            (given if left else words).append(token)
            left = max(0, left - 1)
    return [*words, *given, *tokens[len(own) :]]


def part_script_args(tokens: Sequence[str]) -> tuple[Sequence[str], tuple[str, ...]]:
    """Part Paceline's own words from a script's arguments, which come after `--`."""
    place = list(tokens).index("--") if "--" in tokens else len(tokens)
    return tokens[:place], tuple(tokens[place + 1 :])


def refuse_script_args(script_args: Sequence[str]) -> None:
    """Refuse arguments after `--` where there is no script for them.

    Raises:
        UsageError: There are some.
    """
    if script_args:
        raise UsageError("arguments after -- are for a script; a recipe's are options like others")


def show_help(
    command: str, about: str, options: Iterable[OptionField], tokens: Sequence[str]
) -> NoReturn:
    """Print a command's help: its basic options in short, or all of them in full.

    Args:
        tokens: The command line, with `--help-all` for all of them.

    Raises:
        HelpShown: Always; the command is over. For `LIST_OPTIONS` it holds the options.
    """
    listed = list(options)
    if LIST_OPTIONS in tokens:
        raise HelpShown(*listed)
    # In short only where that leaves something out: the end of the help then says what.
    basic = [replace(o, help=o.summary if o.is_own else o.help) for o in listed if o.is_basic]
    is_short = _HELP_ALL not in tokens and len(basic) < len(listed)
    shown = basic if is_short else listed
    app = App(
        name=command,
        usage=f"Usage: {command}{'' if '[' in command else ' [OPTIONS]'}",
        help=about,
        help_flags=[],
        version_flags=[],
        help_epilogue=_where_the_others_are(listed, shown) if is_short else None,
    )
    app.default(callable_with(shown, brief=_HELP_ALL not in tokens))
    app.help_print([])
    raise HelpShown


def _where_the_others_are(options: Sequence[OptionField], shown: Sequence[OptionField]) -> str:
    headings = {option.group for option in shown}
    others = dict.fromkeys(o.group for o in options if o.group not in headings)
    besides = f", those of {in_words(list(others))} too" if others else ""
    return f"{_HELP_ALL} shows all {len(options)} options in full{besides}."


def read_command(
    usage: str, about: str, tokens: Sequence[str], options: Iterable[OptionField], *words: str
) -> tuple[list[str], dict[str, OptionValue]]:
    """Read the positional arguments of a command, and its options.

    Args:
        usage: Name to show, for example `paceline export RUN_DIR FILE`. The last arguments, those
            in brackets, may be left out.
        words: What each positional argument is, for the error where it is missing.

    Raises:
        HelpShown: Help was asked for and printed.
        UsageError: Something is missing, unknown or unreadable.
    """
    if wants_help(tokens):
        show_help(usage, about, options, tokens)
    given: list[str] = []
    for what in words:
        if len(words) - len(given) <= usage.count("[") and not names_something(tokens):
            break
        word, tokens = take_word(tokens, usage, what)
        given.append(word)
    return given, read_options(usage, about, tokens, options).values


def note(line: str) -> None:
    """Print a note for the user on standard error, apart from a command's result."""
    print(fitting(printable(line), sys.stderr), file=sys.stderr, flush=True)


def wants_help(tokens: Sequence[str]) -> bool:
    """Tell whether help is asked for anywhere on a command line."""
    return any(token in ("--help", "-h", _HELP_ALL, LIST_OPTIONS) for token in tokens)


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
