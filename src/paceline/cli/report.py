"""`paceline report RUN_DIR`: writes a run's page again, also while it is training."""

from collections.abc import Sequence

from paceline.cli.options import parse_options, show_help, take_word, wants_help
from paceline.config.rundir import RunDirectory
from paceline.errors import ExitCode

_ABOUT = "Write RUN_DIR/report.html again; works at any time, while the training runs as well."


def main(tokens: Sequence[str]) -> int:
    """Run the command."""
    command = "paceline report RUN_DIR"
    if wants_help(tokens):
        return show_help(command, _ABOUT, ())
    where, rest = take_word(tokens, command, "the run directory")
    parse_options(command, _ABOUT, rest, ())
    run = RunDirectory.named(where)
    run.read_run()
    from paceline.report.run import write_run_report

    print(write_run_report(run))
    return ExitCode.DONE
