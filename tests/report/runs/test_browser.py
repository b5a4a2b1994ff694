"""The pages about several runs in a real Chromium: sorted without a network, wide and narrow."""

from pathlib import Path

import pytest
from selenium.webdriver import ActionChains, Chrome
from selenium.webdriver.common.by import By

from paceline.report.runs.comparison import choose_runs, compare
from paceline.report.runs.listing import list_runs
from paceline.report.runs.pages import write_comparison, write_index
from tests.report.browsing import find_faults, open_file, requested
from tests.report.runs.conftest import MakeRun
from tests.report.runs.test_pages import NOW

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]


@pytest.fixture
def pages(make_run: MakeRun, folder: Path) -> dict[str, Path]:
    for number, speed in enumerate((10.0, 9000.0, 200.0)):
        make_run(
            f"run-{number}",
            day=3 - number,
            run={"settings": {"lr": number / 10, "name": f"try {number}", "note": "word " * 20}},
            summary={"images_per_s": speed},
        )
    make_run("lost").run_json.unlink()
    compared = compare(choose_runs([str(folder)]))
    return {
        "index": write_index(list_runs(folder), NOW),
        "compare": write_comparison(compared, folder / "c.html"),
    }


@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_overlaps_and_all_can_be_read(
    browser: Chrome, pages: dict[str, Path], width: int, scheme: str
) -> None:
    for page in pages.values():
        open_file(browser, page, width=width, scheme=scheme)
        assert find_faults(browser, width) == []
        assert requested(browser) == [page.as_uri()]


def test_the_pointer_shows_the_values_of_each_run(browser: Chrome, pages: dict[str, Path]) -> None:
    open_file(browser, pages["compare"], width=1200)
    chart = browser.find_element(By.CSS_SELECTOR, "svg[data-chart]")
    ActionChains(browser).move_to_element(chart).perform()
    place, *values = browser.find_element(By.CSS_SELECTOR, ".readout").text.split("\n")
    assert place.startswith("steps ")
    assert [value[0] for value in values] == ["A", "B", "C"]
    assert browser.find_element(By.CSS_SELECTOR, ".hint").is_displayed()


def test_a_heading_sorts_and_what_is_unknown_stays_last(
    browser: Chrome, pages: dict[str, Path]
) -> None:
    open_file(browser, pages["index"], width=1200)

    def press(title: str) -> list[str]:
        browser.find_element(By.XPATH, f"//th/button[text()='{title}']").click()
        return [row.text for row in browser.find_elements(By.CSS_SELECTOR, "tbody th")]

    assert press("images/s") == ["try 1", "lost", "try 2", "try 0"]  # lost has its summary
    assert press("images/s") == ["try 0", "try 2", "lost", "try 1"]
    assert press("run") == ["lost", "try 0", "try 1", "try 2"]
    assert press("workers")[-1] == "lost"
    assert press("workers")[-1] == "lost"
    assert press("started, UTC") == ["try 0", "try 1", "try 2", "lost"]
