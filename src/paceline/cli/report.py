"""`paceline report DIR`: writes the page of a run or a scaling study again, also while it runs."""

from collections.abc import Sequence
from pathlib import Path

from paceline.errors import ExitCode, UsageError
from paceline.files import storing
from paceline.options.command_line import read_command
from paceline.options.text import printable
from paceline.results.run_directory import RunDirectory

_ABOUT = (
    "Write DIR/report.html again, of a run directory or of a scaling study's directory; works at "
    "any time, while it runs as well."
)


def main(tokens: Sequence[str]) -> int:
    """Run the command."""
    (where,), _ = read_command(
        "paceline report DIR", _ABOUT, tokens, (), "the run directory, or that of a scaling study"
    )
    run = RunDirectory.named(where)
    with storing(run.path):
        page = _write(run)
    print(printable(str(page)))
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
