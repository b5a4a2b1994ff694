"""Writes the report of one training: run directory in, `report.html` out."""

from pathlib import Path

from paceline.files import write_atomic
from paceline.report.load_run import read_run
from paceline.report.page import render_page
from paceline.results.run_directory import RunDirectory


def write_run_report(run: RunDirectory) -> Path:
    """Write `report.html` into the run directory; called by one process, not a collective.

    Works at any time: a training that runs, failed or was interrupted gets a page that says so,
    and missing or torn files are said to be so. The page is one file that needs no network.

    Returns:
        The path of the page.

    Raises:
        OSError: The run directory can't be written; an older page stays.
    """
    page = render_page(read_run(run))
    write_atomic(run.report_html, page.encode("utf-8", errors="replace"))
    return run.report_html
