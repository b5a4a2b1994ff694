"""Writes the report of one scaling study: `study.json` in, `report.html` out."""

from pathlib import Path

from paceline.files import write_atomic
from paceline.report.scaling.page import render_page
from paceline.results.study import read_study


def write_scaling_report(study_dir: Path) -> Path:
    """Write `report.html` into a study's directory; called by one process, not a collective.

    Works at any time: what isn't measured yet, failed or is damaged is said to be so on the page.
    The page is one file that needs no network.

    Returns:
        The path of the page.

    Raises:
        OSError: The directory can't be written; an older page stays.
    """
    study, problems = read_study(study_dir)
    page = render_page(study, study_dir, problems)
    path = study_dir / "report.html"
    write_atomic(path, page.encode("utf-8", errors="replace"))
    return path
