"""Puts a run's sentence, figures, curves and tables into one self-contained HTML page."""

from collections.abc import Mapping
from pathlib import Path

from markupsafe import Markup

from paceline.options.shell import command_line
from paceline.report import sections
from paceline.report.charts import Chart, choose_charts, find_marks
from paceline.report.curves import draw_chart, time_places
from paceline.report.load_run import RunReport, read_run
from paceline.report.run_outcome import describe_ending, describe_failure
from paceline.report.scaling.bars import draw_bars
from paceline.report.step_time import read_profile, time_pictures, time_table
from paceline.report.templating import REPORT, fill_template, read_script, write_report
from paceline.results.confusion import Confusion
from paceline.results.json_object import text
from paceline.results.run_directory import RunDirectory


def render_page(report: RunReport) -> str:
    """Render a run as HTML that needs no network; the same run, the same text."""
    problems = list(report.problems)
    run = RunDirectory(report.path)
    ending = describe_ending(report)
    profile = read_profile(run.profile_json, problems)
    pictures = time_pictures(profile) if profile else ()
    charts = choose_charts(report)
    confusion = Confusion.read(run.path / "evaluation" / "confusion.json", problems)
    return fill_template(
        "run.html",
        generator=REPORT,
        name=sections.run_name(report),
        recipe=text(report.run, "recipe") or text(report.summary, "recipe"),
        kind="script" if text(report.run, "kind") == "script" else "recipe",
        script=read_script("chart.js"),
        about=sections.facts_table(report, running=ending.state == "running"),
        again=command_line("report", report.path),
        paceline=text(report.run, "paceline"),
        directory=str(report.path),
        ending=ending,
        figures=sections.key_figures(report),
        charts=[(chart, _picture(chart)) for chart in charts],
        timed=any(time_places(chart) for chart in charts),
        marks=find_marks(report),
        times=[(picture, Markup(draw_bars(picture))) for picture in pictures],
        time_numbers=time_table(pictures),
        confusion=_confusion(confusion),
        epochs=sections.epochs_table(report),
        settings=sections.settings_table(report),
        outcome=sections.outcome_table(report),
        resolved=sections.resolved_table(report),
        environment=sections.environment_table(report),
        hosts=sections.hosts_table(report),
        history=sections.history_table(report),
        failures=[(describe_failure(f), f.traceback) for f in report.failures],
        earlier_failures=[(describe_failure(f), f.traceback) for f in report.earlier_failures],
        snapshots=report.snapshots,
        weights=text(report.summary, "weights_sha256"),
        problems=problems,
    )


def _confusion(confusion: Confusion | None) -> Mapping[str, object] | None:
    if confusion is None:
        return None
    return {
        "says": sections.describe_confusion(confusion),
        "rows": sections.confusion_rows(confusion),
        "classes": sections.classes_table(confusion),
        "mistakes": sections.mistakes_table(confusion),
    }


def _picture(chart: Chart) -> Markup | None:
    """Draw a chart; none where the legend already says the one point that it has."""
    if all(len(series.places or chart.places) < 2 for series in chart.series):
        return None
    return Markup(draw_chart(chart))  # Ours, and its label was escaped by the XML writer.


def write_run_report(run: RunDirectory, path: Path | None = None) -> Path:
    """Write a run's page, and give its path; called by one process, not a collective.

    Works at any time: a training that runs, failed or was interrupted gets a page that says so,
    and missing or torn files are said to be so. The page is one file that needs no network.

    Args:
        path: Where to; by default `report.html` in it.

    Raises:
        UsageError: Something else is in the place that was named.
        OSError: It can't be written; an older page stays.
    """
    page = render_page(read_run(run))
    return write_report(path or run.report_html, page, run.report_html)
