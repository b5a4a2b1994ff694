"""`paceline report [DIR]`: writes the page of a run or a scaling study again, at any time."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.cli.output import check_place
from paceline.errors import ExitCode, UsageError
from paceline.files import writing
from paceline.options.command_line import read_command
from paceline.options.fields import option_fields, pick
from paceline.options.text import printable
from paceline.results.run_directory import RunDirectory

_ABOUT = (
    "Write DIR/report.html again, of a run directory (or the name of a run below runs/) or of a "
    "scaling study's directory, without DIR of the newest run below runs/; works at any time, "
    "while it runs as well."
)


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Where the page goes."""

    html: str | None = None
    """Write the page to this file instead."""


_OPTIONS = option_fields(ReportOptions, "Output")


def main(tokens: Sequence[str]) -> int:
    """Run the command."""
    named, given = read_command(
        "paceline report [DIR]",
        _ABOUT,
        tokens,
        _OPTIONS,
        "the run directory, or that of a scaling study",
    )
    options = pick(ReportOptions, given)
    from paceline.report.runs.listing import run_of_command

    run = run_of_command(named, "report", "Report of", "DIR")
    path = Path(options.html).expanduser() if options.html else None
    if path is not None:
        check_place("--html", path)
    with writing(path or run.report_html):
        page = _write(run, path)
    print(printable(str(page)))
    return ExitCode.DONE


def _write(run: RunDirectory, path: Path | None) -> Path:
    if (run.path / "study.json").is_file():
        from paceline.report.scaling.page import write_scaling_report

        return write_scaling_report(run.path, path)
    if not run.run_json.exists():
        raise UsageError(
            f"{run.path} holds no training (no {run.run_json.name}) and no scaling study "
            "(no study.json)"
        )
    run.read_run()
    from paceline.report.page import write_run_report

    return write_run_report(run, path)
