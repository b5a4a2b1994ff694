"""`--quiet`, `--verbose` and `--json`: how much a command says, and where."""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self, final

from paceline.errors import InfrastructureError, UsageError
from paceline.files import writing
from paceline.launch.local.streams import why_lost
from paceline.options.command_line import flag, note
from paceline.options.fields import OptionField, OptionValue
from paceline.options.figures import show_value
from paceline.options.text import aligned, printable
from paceline.results.run_directory import RunDirectory
from paceline.training.config import TrainRequest, training_options


def output_options(quiet: str, verbose: str, as_json: str) -> tuple[OptionField, ...]:
    """Make a command's three options.

    Args:
        quiet: What `--quiet` does, for its help; likewise the others.
    """
    texts = {"quiet": quiet, "verbose": verbose, "json": as_json}
    return tuple(
        OptionField(
            name=name,
            annotation=bool,
            default=False,
            help=text,
            group="Output",
        )
        for name, text in texts.items()
    )


TRAIN_OUTPUT = output_options(
    "Print warnings and errors alone; the progress is off.",
    "Also print each setting that isn't the default, and where it is from.",
    "Print the summary, when all is over, as one JSON object on standard output; everything else "
    "goes to standard error.",
)


@final
@dataclass(frozen=True, kw_only=True)
class Output:
    """How much a command says, and where."""

    quiet: bool = False
    verbose: bool = False
    json: bool = False

    @classmethod
    def take(cls, given: dict[str, OptionValue]) -> Self:
        """Take these options out of what was given."""
        own = {name: given.pop(name, False) is True for name in ("quiet", "verbose", "json")}
        return cls(**own)

    def quieten(self, settings: dict[str, OptionValue]) -> None:
        """With `--quiet`, switch progress off unless the settings say something of it."""
        if self.quiet:
            settings.setdefault("progress", "off")

    @contextmanager
    def apart(self) -> Iterator[None]:
        """With `--json`, send to standard error what this process and its children print."""
        if not self.json:
            yield
            return
        sys.stdout.flush()
        kept = os.dup(1)
        os.dup2(2, 1)
        try:
            yield
        finally:
            sys.stdout.flush()
            os.dup2(kept, 1)
            os.close(kept)

    def refuse_json(self, on: str) -> None:
        """Refuse `--json` for a training that ends elsewhere.

        Raises:
            UsageError: It was given.
        """
        if self.json:
            raise UsageError(
                f"--json has no effect with --on {on}: read summary.json in the run directory there"
            )

    def sent_on(self) -> list[str]:
        """Give the options by which the same command, run elsewhere, prints as much."""
        return ["--quiet"] if self.quiet else []

    def print_end(self, run: RunDirectory, code: int) -> None:
        """With `--json`, print how a training ended; its first process calls it.

        Args:
            run: The run directory, of which `summary.json` is printed where there is one.
        """
        if not self.json:
            return
        try:
            summary = run.read_summary()
        except (OSError, ValueError):
            summary = {}
        print_json({"run_dir": str(run.path), "exit_code": int(code), **summary})

    def print_settings(
        self, request: TrainRequest, given: Mapping[str, str], *, dry_run: bool
    ) -> None:
        """With `--verbose` or `--dry-run`, say which settings aren't the defaults.

        Args:
            given: Where each option that was given is from, by name; the others are the recipe's.
            dry_run: They are a part of what the command is for.

        Raises:
            UsageError: `--json` was given as well.
        """
        if dry_run and self.json:
            raise UsageError("--json has no effect with --dry-run: there will be no summary")
        lines = changed_settings(request, given) if dry_run or self.verbose else []
        for line in lines:
            if dry_run:
                print(printable(line))
            else:
                note(line)


FULL_OUTPUT = Output()


def changed_settings(request: TrainRequest, given: Mapping[str, str]) -> list[str]:
    """List the settings that were given or aren't the defaults, a line each, and where from."""
    defaults = {name: option.default for name, option in training_options().items()}
    shown = {
        name: value
        for name, value in request.settings.items()
        if value != defaults.get(name) or given.get(name, "run") != "run"
    }
    shown |= {n: v for n, v in request.arguments.items() if n in given}
    rows = [
        (flag(name), show_value(value), f"({given.get(name, 'recipe')})")
        for name, value in shown.items()
    ]
    return [f"  {line}" for line in aligned(rows, left=range(3))] if rows else []


def print_json(content: object) -> None:
    """Print a result as one line of JSON on standard output.

    Raises:
        InfrastructureError: It can't be written.
    """
    print(json.dumps(content, allow_nan=False), flush=True)
    if error := why_lost(sys.stdout):
        raise InfrastructureError(f"standard output can't be written: {error.strerror}")


def check_place(option: str, path: Path) -> None:
    """Refuse a file that couldn't be written at the end.

    Raises:
        UsageError: It couldn't.
    """
    directory = path.absolute().parent
    with writing(path):  # a directory that nobody may enter
        if not directory.is_dir():
            raise UsageError(f"{option} {path}: there is no directory for it, make it first")
        if path.is_dir():
            raise UsageError(f"{option} {path} is a directory: give a file's name")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise UsageError(f"{option} {path}: its directory can't be written")
