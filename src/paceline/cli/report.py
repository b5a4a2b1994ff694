"""`paceline report DIR`: writes the page of a run or a scaling study again, also while it runs."""

from collections.abc import Sequence
from pathlib import Path

from paceline.errors import ExitCode, UsageError
from paceline.options.command_line import parse_options, show_help, take_word, wants_help
from paceline.options.text import printable
from paceline.results.run_directory import RunDirectory

_ABOUT = (
    "Write DIR/report.html again, of a run directory or of a scaling study's directory; works at "
    "any time, while it runs as well."
)


def main(tokens: Sequence[str]) -> int:
    """Run the command."""
    command = "paceline report DIR"
    if wants_help(tokens):
        return show_help(command, _ABOUT, ())
    where, rest = take_word(tokens, command, "the run directory, or that of a scaling study")
    parse_options(command, _ABOUT, rest, ())
    print(printable(str(_write(RunDirectory.named(where)))))
    return ExitCode.DONE


def _write(run: RunDirectory) -> Path:
    if (run.path / "study.json").is_file():
        from paceline.report.scaling.page import write_scaling_report

        return write_scaling_report(run.path)
    if not run.run_json.exists():
        raise UsageError(
            f"{run.path} holds no training (no {run.run_json.name}) and no scaling study "
            "(no study.json)"
        )
    run.read_run()
    from paceline.report.page import write_run_report

    return write_run_report(run)
