"""The page of a comparison in a real Chromium: without a network, wide and narrow."""

from pathlib import Path

import pytest
from selenium.webdriver import ActionChains, Chrome
from selenium.webdriver.common.by import By

from paceline.report.runs.comparison import choose_runs, compare, write_comparison
from tests.report.browsing import find_faults, open_file, requested
from tests.report.runs.conftest import MakeRun

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]


@pytest.fixture
def page(make_run: MakeRun, folder: Path) -> Path:
    for number, speed in enumerate((10.0, 9000.0, 200.0)):
        make_run(
            f"run-{number}",
            day=3 - number,
            run={"settings": {"lr": number / 10, "name": f"try {number}", "note": "word " * 20}},
            summary={"images_per_s": speed},
        )
    make_run("lost").run_json.unlink()
    return write_comparison(compare(choose_runs([str(folder)])), folder / "c.html")


@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_overlaps_and_all_can_be_read(
    browser: Chrome, page: Path, width: int, scheme: str
) -> None:
    open_file(browser, page, width=width, scheme=scheme)
    assert find_faults(browser, width) == []
    assert requested(browser) == [page.as_uri()]


def test_the_pointer_shows_the_values_of_each_run(browser: Chrome, page: Path) -> None:
    open_file(browser, page, width=1200)
    chart = browser.find_element(By.CSS_SELECTOR, "svg[data-chart]")
    ActionChains(browser).move_to_element(chart).perform()
    place, *values = browser.find_element(By.CSS_SELECTOR, ".readout").text.split("\n")
    assert place.startswith("steps ")
    assert [value[0] for value in values] == ["A", "B", "C"]
    assert browser.find_element(By.CSS_SELECTOR, ".hint").is_displayed()
