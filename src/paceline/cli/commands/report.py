"""`paceline report [DIR]`: writes the page of a run or a scaling study again, at any time."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.cli.output import check_place
from paceline.errors import ExitCode, UsageError
from paceline.files import storing
from paceline.options.command_line import note, read_command
from paceline.options.fields import OptionField, OptionValue
from paceline.options.text import printable
from paceline.results.find_runs import choose_run
from paceline.results.run_directory import RunDirectory

_ABOUT = (
    "Write DIR/report.html again, of a run directory (or the name of a run below runs/) or of a "
    "scaling study's directory, without DIR of the newest run below runs/; works at any time, "
    "while it runs as well. With --watch serve a run's page until Ctrl-C, made again whenever the "
    "run has something new."
)
_LOOPBACK = "127.0.0.1"
_OPTIONS = (
    OptionField(
        name="html",
        annotation=str | None,
        default=None,
        help="Write the page to this file instead.",
        group="Output",
    ),
    OptionField(
        name="watch",
        annotation=bool,
        default=False,
        help="Serve the page of a run, which follows it, and print its URL. Who knows the URL can "
        "read the page.",
        group="Following a run",
    ),
    OptionField(
        name="host",
        annotation=str,
        default=_LOOPBACK,
        help="Address to serve on: by default this machine alone reaches it.",
        group="Following a run",
    ),
    OptionField(
        name="port",
        annotation=int,
        default=0,
        help="Port to serve on; 0 for a free one.",
        group="Following a run",
    ),
)


def main(tokens: Sequence[str]) -> int:
    """Run the command."""
    named, given = read_command(
        "paceline report [DIR]",
        _ABOUT,
        tokens,
        _OPTIONS,
        "the run directory, or that of a scaling study",
    )
    run = choose_run(*named) if named else _newest()
    if given.get("watch"):
        if given.get("html"):
            raise UsageError("--watch serves the page, and --html writes it: give one of the two")
        return _watch(run, given)
    for name in ("host", "port"):
        if name in given:
            raise UsageError(f"--{name} says where to serve the page: it needs --watch")
    path = Path(str(given["html"])).expanduser() if given.get("html") else None
    if path is not None:
        check_place("--html", path)
    with storing(path or run.path):
        page = _write(run, path)
    print(printable(str(page)))
    return ExitCode.DONE


def _newest() -> RunDirectory:
    from paceline.report.runs.listing import newest_started, usual_run

    return usual_run("report", "Report of", newest_started, "DIR")


def _watch(run: RunDirectory, given: Mapping[str, OptionValue]) -> int:
    """Serve the page until Ctrl-C."""
    host, port = str(given.get("host", _LOOPBACK)), int(str(given.get("port", 0)))
    if not 0 <= port <= 65535:
        raise UsageError(f"--port is {port}; it should be from 0 to 65535")
    if not run.run_json.exists():
        raise UsageError(f"{run.path} holds no training (no {run.run_json.name}): nothing to watch")
    from paceline.report.load_run import read_run
    from paceline.report.page import render_page
    from paceline.report.page_server import FollowedPage, PageServer, version_of

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
            return ExitCode.DONE
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
