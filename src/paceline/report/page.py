"""Puts a run's sentence, figures, curves and tables into one self-contained HTML page."""

import shlex
from pathlib import Path

from markupsafe import Markup

from paceline.files import write_atomic
from paceline.report import sections
from paceline.report.charts import Chart, choose_charts, find_marks
from paceline.report.curves import draw_chart
from paceline.report.load_run import RunReport, read_run
from paceline.report.run_outcome import describe_ending, describe_failure
from paceline.report.templating import fill_template
from paceline.results.json_object import text, texts
from paceline.results.run_directory import RunDirectory


def render_page(report: RunReport) -> str:
    """Render a run as HTML that needs no network and no script; the same run, the same text."""
    return fill_template(
        "run.html",
        recipe=text(report.run, "recipe") or text(report.summary, "recipe") or report.path.name,
        paceline=text(report.run, "paceline"),
        directory=str(report.path),
        ending=describe_ending(report),
        figures=sections.key_figures(report),
        charts=[(chart, _picture(chart)) for chart in choose_charts(report)],
        marks=find_marks(report),
        epochs=sections.epochs_table(report),
        settings=sections.settings_table(report),
        outcome=sections.outcome_table(report),
        environment=sections.environment_table(report),
        hosts=sections.hosts_table(report),
        history=sections.history_table(report),
        failures=[(describe_failure(f), f.traceback) for f in report.failures],
        earlier_failures=[(describe_failure(f), f.traceback) for f in report.earlier_failures],
        snapshots=report.snapshots,
        weights=text(report.summary, "weights_sha256"),
        command=shlex.join(texts(report.run, "command")),
        problems=report.problems,
    )


def _picture(chart: Chart) -> Markup:
    return Markup(draw_chart(chart))  # Ours, and its label was escaped by the XML writer.


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
