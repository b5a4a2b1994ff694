"""Puts a study's sentences, pictures and tables into one self-contained HTML page."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from markupsafe import Markup

from paceline.report.scaling import tables
from paceline.report.scaling.bars import BarPicture, draw_bars, fixed_picture, step_picture
from paceline.report.scaling.captions import describe_fixed
from paceline.report.scaling.charts import (
    COLOURS_THERE,
    Picture,
    efficiency_picture,
    learning_pictures,
    throughput_picture,
)
from paceline.report.scaling.lines import draw_lines
from paceline.report.scaling.status import describe_state, find_gaps
from paceline.report.sections import facts
from paceline.report.templating import REPORT, fill_template, read_script, write_report
from paceline.results.study import Study, read_study

_BEFORE_UNIT = re.compile(r"(?<=\d) (?=%|m?s\b)")


def render_page(study: Study, directory: Path, problems: Sequence[str] = ()) -> str:
    """Render a study as HTML that needs no network; the same study, the same text.

    Args:
        problems: With its file, a sentence each.
    """
    measured = bool(study.measured)
    lines = (throughput_picture(study), efficiency_picture(study)) if measured else ()
    step, fixed = (step_picture(study), fixed_picture(study)) if measured else (None, None)
    prediction = study.predicted
    return fill_template(
        "scaling.html",
        generator=REPORT,
        recipe=study.recipe or directory.name,
        paceline=study.paceline,
        directory=str(directory),
        script=read_script("chart.js"),
        about=facts(started_at=study.started_at, hosts=study.hosts, command=study.command),
        state=describe_state(study),
        problems=problems,
        figures=tables.key_figures(study),
        scaling=[_with_lines(picture) for picture in lines],
        times=[_with_bars(picture) for picture in (step, fixed) if picture],
        no_fixed=describe_fixed(study) if measured and fixed is None else "",
        learning=[_with_lines(picture) for picture in learning_pictures(study)],
        colours=COLOURS_THERE,
        table=tables.study_table(study),
        parts=tables.parts_table(study),
        repeats=tables.repeats_table(study),
        prediction=tables.prediction_table(study),
        advice=() if prediction is None else prediction.text,
        link=tables.link_text(study),
        settings=tables.settings_table(study),
        gaps=find_gaps(study),
        notes=study.notes,
    )


def _with_lines(picture: Picture) -> tuple[Picture, str, Markup]:
    return picture, _unbroken(picture.caption), Markup(draw_lines(picture))


def _with_bars(picture: BarPicture) -> tuple[BarPicture, Markup]:
    return replace(picture, caption=_unbroken(picture.caption)), Markup(draw_bars(picture))


def _unbroken(sentence: str) -> str:
    """Keep figures and their units on one line."""
    return _BEFORE_UNIT.sub("\N{NO-BREAK SPACE}", sentence)


def write_scaling_report(study_dir: Path, path: Path | None = None) -> Path:
    """Write a study's page, and give its path; called by one process, not a collective.

    Works at any time: what isn't measured yet, failed or is damaged is said to be so on the page.
    The page is one file that needs no network.

    Args:
        path: Where to; by default `report.html` in it.

    Raises:
        UsageError: Something else is in the place that was named.
        OSError: It can't be written; an older page stays.
    """
    study, problems = read_study(study_dir)
    page = render_page(study, study_dir, problems)
    usual = study_dir / "report.html"
    return write_report(path or usual, page, usual)
