"""`paceline report [DIR]`: writes the page of a run or a scaling study again, at any time."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.cli.output import check_place
from paceline.errors import ExitCode, UsageError
from paceline.files import writing
from paceline.options.command_line import note, read_command
from paceline.options.fields import option_fields, pick
from paceline.options.text import above_progress, printable
from paceline.results.run_directory import RunDirectory

_ABOUT = (
    "Write DIR/report.html again, of a run directory (or the name of a run below runs/) or of a "
    "scaling study's directory, without DIR of the newest run below runs/; works at any time, "
    "while it runs as well. With --watch serve a run's page until Ctrl-C, made again whenever the "
    "run has something new."
)


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Where the page goes."""

    html: str | None = field(default=None, metadata={"group": "Output"})
    """Write the page to this file instead."""
    watch: bool = False
    """Serve the page of a run, which follows it, and print its URL. Who knows the URL can read the
    page."""
    host: str = "127.0.0.1"
    """Address to serve on: by default this machine alone reaches it."""
    port: int = 0
    """Port to serve on; 0 for a free one."""


_OPTIONS = option_fields(ReportOptions, "Following a run")


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
    from paceline.report.runs.listing import newest_started, run_of_command

    run = run_of_command(named, "report", "Report of", newest_started, "DIR")
    # Serve the page, made again whenever the run's files change ...
    if options.watch:
        if options.html:
            raise UsageError("--watch serves the page, and --html writes it: give one of the two")
        return _watch(run, options.host, options.port)
    for name in ("host", "port"):
        if name in given:
            raise UsageError(f"--{name} says where to serve the page: it needs --watch")
    # ... or write it once.
    path = Path(options.html).expanduser() if options.html else None
    if path is not None:
        check_place("--html", path)
    with writing(path or run.report_html):
        page = _write(run, path)
    print(printable(str(page)))
    return ExitCode.DONE


def _watch(run: RunDirectory, host: str, port: int) -> int:
    """Serve the page until Ctrl-C."""
    if not 0 <= port <= 65535:
        raise UsageError(f"--port is {port}; it should be from 0 to 65535")
    if not run.run_json.exists():
        raise UsageError(f"{run.path} holds no training (no {run.run_json.name}): nothing to watch")
    run.read_run()
    from paceline.report.load_run import read_run
    from paceline.report.page import render_page
    from paceline.report.page_server import FollowedPage, PageServer, version_of

    # Made again when a file of the run changes, or its lock is taken or released.
    page = FollowedPage(
        lambda: version_of(run.path, str(run.is_locked())),
        lambda version: render_page(read_run(run), follow=version),
    )
    with PageServer(page, host, port) as server:
        print(printable(server.url), flush=True)
        note("Ctrl-C ends it")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print(above_progress(""), end="", file=sys.stderr, flush=True)  # no ^C before a prompt
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
