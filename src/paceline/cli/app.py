"""The `paceline` command: finds the subcommand and imports that one alone. Imports no torch."""

import errno
import importlib
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path

from paceline._version import __version__
from paceline.errors import ExitCode, HelpShown, PacelineError, UsageError
from paceline.options.fields import unknown_name, with_dashes
from paceline.options.text import above_progress, fitting, printable, shortened


@dataclass(frozen=True)
class Command:
    """One subcommand: `main(tokens) -> int` of the module in `cli/commands/` that has its name."""

    heading: str
    """Under which `paceline --help` lists it."""
    help: str
    prints_its_result: bool = False
    """Whether what it prints is all that it is for."""


_TRAIN, _RUNS = "Train", "Runs"
_PROVE, _PREPARE = "Prove and measure", "Machines"
COMMANDS: Mapping[str, Command] = {
    "train": Command(_TRAIN, "Train a recipe on N workers."),
    "run": Command(_TRAIN, "Run a training script of your own on N workers."),
    "resume": Command(_TRAIN, "Resume a training that was stopped."),
    "evaluate": Command(_TRAIN, "Evaluate a trained model on its validation set.", True),
    "export": Command(_TRAIN, "Write a trained model's weights to a file."),
    "recipes": Command(_TRAIN, "List the built-in recipes.", True),
    "init": Command(_TRAIN, "Write a small project to begin with.", True),
    "runs": Command(_RUNS, "List runs: state, best result, speed, when.", True),
    "compare": Command(_RUNS, "Show which settings of runs differ, and how each ended.", True),
    "report": Command(_RUNS, "Write a run's or a study's report.html again."),
    "verify": Command(_PROVE, "Prove a training the same on several numbers of workers."),
    "scale": Command(_PROVE, "Measure how a training scales, and why so."),
    "predict": Command(_PROVE, "Predict how a training would scale on hosts not yet there."),
    "doctor": Command(_PROVE, "Find what would stop or slow a training.", True),
    "aws": Command(_PREPARE, "Make nodes on AWS to train on, and delete them again."),
}
"""Those of every day first, by headings."""

_MODULES = "paceline.cli.commands"
_COMPLETION = "--completion"
_ABOUT = (
    "Data-parallel PyTorch training, the same on any number of workers. "
    "`paceline COMMAND --help` tells more; `paceline train` alone trains the embedded digits. "
    "`paceline --completion SHELL` (bash, zsh, fish) completes commands and options."
)


def prints_its_result(tokens: Sequence[str]) -> bool:
    """Tell whether a command is for what it prints, so that it fails where that can't be written.

    Other commands do what they are for, and may go on without anybody to tell.
    """
    command = COMMANDS.get(tokens[0]) if tokens else None
    return (
        command is None or command.prints_its_result or "--help" in tokens or "--help-all" in tokens
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and give its exit code (see `errors.ExitCode`)."""
    tokens = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a name that isn't UTF-8 is shown, not an error
            stream.reconfigure(errors="backslashreplace")
    try:
        return _dispatch(tokens)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output left; Python must not complain at exit
        return ExitCode.DONE
    except PacelineError as error:
        from paceline.launch.errors.error_records import message_of

        text = printable(message_of(error))
        print(fitting(f"paceline: {shortened(text)}", sys.stderr), file=sys.stderr)
        return error.exit_code
    except Exception as error:  # noqa: BLE001  # the process boundary
        return _report(error)
    except KeyboardInterrupt:
        return _report_interrupt()


def _report(error: Exception) -> int:
    """Report an exception that no command has handled, and give the exit code."""
    if message := _misuse(error):
        text = shortened(printable(message))
        print(fitting(f"paceline: {text}", sys.stderr), file=sys.stderr)
        return ExitCode.USAGE
    from paceline.launch.errors.error_records import exit_code_of, kind_of
    from paceline.launch.signals import was_interrupted

    if was_interrupted():  # what a library made of it: numpy, an import that failed
        return _report_interrupt()
    traceback.print_exception(error)
    return exit_code_of(kind_of(error))


def _report_interrupt() -> int:
    print(above_progress("paceline: interrupted"), file=sys.stderr)
    return ExitCode.RESUMABLE


def _misuse(error: Exception) -> str:
    """Say what a command was given that the system refuses; '' for any other failure."""
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return f"{error.strerror}: {error.filename}"
    if isinstance(error, FileNotFoundError):
        try:
            Path.cwd()
        except FileNotFoundError:
            return (
                "the working directory has been removed. Change to one that is there (cd), and "
                "start again"
            )
    return ""


def _dispatch(tokens: list[str]) -> int:
    if not tokens or tokens[0] in ("--help", "-h", "help"):
        _print_help()
        return ExitCode.DONE
    if tokens[0] in ("--version", "-V"):
        print(__version__)
        return ExitCode.DONE
    if tokens[0] == _COMPLETION:
        print(_completion(tokens[1:]))
        return ExitCode.DONE
    name, *rest = tokens
    if name not in COMMANDS:
        text = printable(shortened(unknown_name(name, COMMANDS, "command")))
        print(fitting(f"paceline: {text}", sys.stderr), file=sys.stderr)
        return ExitCode.USAGE
    # Only the subcommand's own module is imported, so that it starts quickly.
    run = importlib.import_module(f"{_MODULES}.{name}").main
    code: int = ExitCode.DONE
    with suppress(HelpShown):
        code = run(_words_first(run, with_dashes(rest)))
    return code


def _words_first(run: Callable[[Sequence[str]], int], tokens: list[str]) -> list[str]:
    """Move what a command is for, such as a script, before the options, where commands read it."""
    from paceline.options.command_line import LIST_OPTIONS, wants_help, with_words_first

    if tokens[:1] and tokens[0].startswith("-") and not wants_help(tokens):
        try:
            run([LIST_OPTIONS])
        except HelpShown as listed:
            return with_words_first(tokens, listed.args)
    return tokens


def _completion(tokens: Sequence[str]) -> str:
    from paceline.cli.completion import completion_script

    if len(tokens) != 1:
        raise UsageError(f"name the shell: paceline {_COMPLETION} bash, zsh or fish")
    return completion_script(
        tokens[0], {n: (f"{_MODULES}.{n}", c.help) for n, c in COMMANDS.items()}
    )


def _print_help() -> None:
    from cyclopts import App, Group

    headings = dict.fromkeys(command.heading for command in COMMANDS.values())
    groups = {heading: Group.create_ordered(heading) for heading in headings}
    last = Group.create_ordered("Options")
    app = App(
        name="paceline",
        help=_ABOUT,
        help_flags=["--help"],
        version=__version__,
        group_commands=last,
    )
    for place, (name, command) in enumerate(COMMANDS.items()):
        group, module = groups[command.heading], f"{_MODULES}.{name}:main"
        app.command(module, name=name, help=command.help, group=group, sort_key=place)
    app.help_print([])
