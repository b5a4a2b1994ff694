"""A study's page in a real Chromium: wide and on a phone, light and dark."""

from pathlib import Path
from typing import cast

import pytest
from selenium.webdriver import Chrome

from paceline.report.scaling.page import write_scaling_report
from tests.report.browsing import CONTRAST, LAYOUT, open_file, requested
from tests.report.scaling.studies import Record, study_record, write_study

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages of studies small and large, good and bad."""
    several = study_record(
        (1, 2, 4, 8), ("allreduce", "bf16", "powersgd"), train=True, predict=True
    )
    failed = cast("list[Record]", several["sizes"])[3]
    failed |= {"images_per_s": None, "problem": "RuntimeError: " + "x" * 400}
    studies = {
        "one": study_record((1,)),
        "three": study_record((1, 2, 3), train=True),
        "eight": study_record((1, 2, 4, 8, 16, 32, 64, 128), train=True, predict=True),
        "close": study_record((10, 11, 60, 64, 100, 101, 110, 120), ("powersgd",)),
        "methods": several,
    }
    root = tmp_path_factory.mktemp("studies")
    return {
        name: write_scaling_report(write_study(root / name, record))
        for name, record in studies.items()
    }


NAMES = ("one", "three", "eight", "close", "methods")


@pytest.mark.parametrize("width", [375, 1200])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_overlaps_or_is_cut_off(
    browser: Chrome, pages: dict[str, Path], name: str, width: int
) -> None:
    open_file(browser, pages[name], width=width)
    found = browser.execute_script(LAYOUT)
    assert found == {"touching": [], "outside": [], "overflow": False, "small": 0, "unnamed": 0}


def test_nothing_is_fetched_and_nothing_is_complained_about(
    browser: Chrome, pages: dict[str, Path]
) -> None:
    open_file(browser, pages["methods"], width=1200)
    urls = [url for url in requested(browser) if not url.startswith("data:")]
    assert urls == [pages["methods"].as_uri()]
    assert browser.get_log("browser") == []


def test_text_has_contrast_and_lines_change_colour_in_the_dark(
    browser: Chrome, pages: dict[str, Path]
) -> None:
    strokes = []
    for scheme in ("light", "dark"):
        open_file(browser, pages["methods"], width=1200, scheme=scheme)
        _, contrast = browser.execute_script(CONTRAST)
        assert contrast >= 4.5
        script = """return [...document.querySelectorAll('.chart path')].flatMap(
            p => [getComputedStyle(p).stroke, getComputedStyle(p).fill])"""
        strokes.append(set(browser.execute_script(script)))
    assert len(strokes[0]) > 8
    assert strokes[0] & strokes[1] <= {"none", "rgb(0, 0, 0)"}


def test_every_wide_table_scrolls_on_a_phone(browser: Chrome, pages: dict[str, Path]) -> None:
    open_file(browser, pages["three"], width=375)
    script = """return [...document.querySelectorAll('.scroll')].map(
        s => [s.tabIndex, s.scrollWidth > s.clientWidth, getComputedStyle(s).overflowX])"""
    tables = browser.execute_script(script)
    assert [0, True, "auto"] in tables
    assert {(index, how) for index, _, how in tables} == {(0, "auto")}
