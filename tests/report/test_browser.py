"""The page in a real Chromium: nothing is fetched, nothing overflows, dark mode is dark."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from selenium.webdriver import ActionChains, Chrome, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from paceline.report.page import write_run_report
from paceline.report.verification import write_verification
from paceline.results.run_directory import RunDirectory
from tests.report.browsing import CONTRAST, LAYOUT, find_faults, open_file, requested
from tests.report.conftest import metrics_row
from tests.report.pages import LONG, RUNS, write_pages
from tests.report.test_verification import FINDING, FOUND, RESUMED

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]
MakeRun = Callable[..., RunDirectory]


def open_page(browser: Chrome, run: RunDirectory, *, width: int, scheme: str = "light") -> None:
    open_file(browser, write_run_report(run), width=width, scheme=scheme)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
def test_nothing_is_fetched_and_nothing_is_complained_about(
    browser: Chrome, make_run: MakeRun, width: int, scheme: str
) -> None:
    run = make_run()
    open_page(browser, run, width=width, scheme=scheme)
    urls = [url for url in requested(browser) if not url.startswith("data:")]
    assert urls == [run.report_html.as_uri()]
    assert browser.get_log("browser") == []


def test_curves_are_drawn_at_a_readable_size(browser: Chrome, make_run: MakeRun) -> None:
    open_page(browser, make_run(), width=360)
    script = """
        return [...document.querySelectorAll('.chart svg')].map(svg => ({
            label: svg.getAttribute('aria-label'),
            width: svg.getBoundingClientRect().width,
            height: svg.getBoundingClientRect().height,
            text: Math.min(...[...svg.querySelectorAll('text')].map(
                t => t.getBoundingClientRect().height)),
            lines: [...svg.querySelectorAll('path')].filter(
                p => p.getBoundingClientRect().width > 200).length}))
    """
    charts = browser.execute_script(script)
    assert len(charts) == 6
    for chart in charts:
        assert chart["label"]
        assert chart["width"] > 300
        assert chart["height"] > 150
        assert chart["text"] >= 9
        assert chart["lines"] >= 1


def test_text_has_contrast_in_light_and_in_dark(browser: Chrome, make_run: MakeRun) -> None:
    run = make_run()
    papers = []
    for scheme in ("light", "dark"):
        open_page(browser, run, width=1200, scheme=scheme)
        paper, contrast = browser.execute_script(CONTRAST)
        assert contrast >= 4.5
        papers.append(paper)
    assert papers[0] != papers[1]


def test_curves_change_colour_in_the_dark(browser: Chrome, make_run: MakeRun) -> None:
    run = make_run()
    strokes = []
    for scheme in ("light", "dark"):
        open_page(browser, run, width=1200, scheme=scheme)
        script = """return [...document.querySelectorAll('.chart path')].map(
            p => getComputedStyle(p).stroke)"""
        strokes.append(set(browser.execute_script(script)))
    assert len(strokes[0]) > 3
    assert strokes[0] & strokes[1] <= {"none"}


def test_print_shows_the_folded_parts(browser: Chrome, make_run: MakeRun) -> None:
    run = make_run(done=20, because="epochs")  # More epochs than are unfolded at first.
    browser.get(write_run_report(run).as_uri())
    rows = "return document.querySelector('details tbody').getBoundingClientRect().height"
    assert browser.execute_script("return document.querySelector('details').open") is False
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    printed = browser.execute_script(rows)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert printed > 100


READOUT = """const shown = document.querySelector('.readout');
    return [shown.hidden, shown.innerText.split('\\n')]"""
STILL = """return [...document.querySelector('svg[data-chart]').children].map(
    part => part.style.display === 'none')"""


def first_chart(browser: Chrome, run: RunDirectory) -> WebElement:
    open_page(browser, run, width=1200)
    return browser.find_element(By.CSS_SELECTOR, "svg[data-chart]")


def test_the_pointer_shows_values_and_zooms(browser: Chrome, make_run: MakeRun) -> None:
    run = make_run()
    chart = first_chart(browser, run)
    middle = ActionChains(browser).move_to_element_with_offset(chart, 0, 0)
    middle.perform()
    _, (epoch, training, validation) = browser.execute_script(READOUT)
    number = int(epoch.removeprefix("epoch "))
    assert 5 <= number <= 7  # of twelve
    row = metrics_row(number, 20)
    assert training == f"training {row['train_loss']:.4g}"
    assert validation == f"validation {row['val_loss']:.4g}"
    ActionChains(browser).click_and_hold().move_by_offset(100, 0).release().perform()
    assert True in browser.execute_script(STILL)
    assert browser.get_log("browser") == []  # also what the page's policy refuses
    ActionChains(browser).double_click().perform()
    assert True not in browser.execute_script(STILL)


def test_keys_show_values_and_zoom(browser: Chrome, make_run: MakeRun) -> None:
    chart = first_chart(browser, make_run())
    chart.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_LEFT)
    hidden, (epoch, *_) = browser.execute_script(READOUT)
    assert (hidden, epoch) == (False, "epoch 1")
    chart.send_keys("+")
    assert True in browser.execute_script(STILL)
    chart.send_keys(Keys.ESCAPE)
    assert True not in browser.execute_script(STILL)
    assert browser.execute_script(READOUT)[0] is True


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Path]]:
    with write_pages(tmp_path_factory.mktemp("pages")) as written:
        yield written


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (390, "dark")])
@pytest.mark.parametrize("name", [*RUNS, "compare", "study"])
def test_every_kind_of_page_fits_and_can_be_read(
    browser: Chrome, pages: Mapping[str, Path], name: str, width: int, scheme: str
) -> None:
    open_file(browser, pages[name], width=width, scheme=scheme)
    assert find_faults(browser, width) == []


def test_what_is_wrong_with_a_page_is_found(browser: Chrome, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("""<meta name="viewport" content="width=device-width">
        <body style="background: white"><p style="color: #ccc">pale</p>
        <div style="width: 900px">wide</div><svg></svg><script>nobody()</script>""")
    open_file(browser, page, width=390)
    found = [fault.partition(":")[0] for fault in find_faults(browser, 390)]
    assert found == [
        "wider than the window",
        "pictures or headings without a name",
        "contrast below 4.5",
        "complaints",
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_side_of_a_table_that_goes_on_can_be_seen(
    browser: Chrome, pages: Mapping[str, Path], scheme: str
) -> None:
    open_file(browser, pages["finished"], width=390, scheme=scheme)
    paper, shade = browser.execute_script(
        """const names = getComputedStyle(document.documentElement), found = [];
        const paint = new OffscreenCanvas(1, 1).getContext('2d');
        for (const name of ['--paper', '--shade']) {
            paint.fillStyle = names.getPropertyValue(name); paint.fillRect(0, 0, 1, 1);
            found.push([...paint.getImageData(0, 0, 1, 1).data].slice(0, 3)); }
        return found;"""
    )
    assert max(abs(a - b) for a, b in zip(paper, shade, strict=True)) > 45


FIGURES = """
    const cells = [...document.querySelectorAll('.figures > div')].map(cell => {
        const range = document.createRange(); range.selectNodeContents(cell);
        return [cell.textContent, cell.getBoundingClientRect(), range.getBoundingClientRect()]; });
    return cells.filter(([, cell, inside]) => inside.right > cell.right + 1).map(([text]) => text);
"""


def test_no_option_and_no_figure_is_parted(browser: Chrome, make_run: MakeRun) -> None:
    run = make_run()
    content = json.loads(run.run_json.read_text())
    words = [f"--an-option-{'x' * number}" for number in range(1, 14)]
    run.run_json.write_text(json.dumps({**content, "command": ["paceline", "train", *words]}))
    summary = json.loads(run.summary_json.read_text())
    run.summary_json.write_text(json.dumps({**summary, "train_time_s": 2771.0}))
    lines = """return [...document.querySelectorAll(arguments[0])].map(e => {
        const range = document.createRange(); range.selectNodeContents(e);
        return [e.textContent, new Set([...range.getClientRects()].map(r => r.top)).size]; })"""
    for width in (390, 1200):
        open_page(browser, run, width=width)
        assert browser.execute_script(lines, "code .whole") == [[word, 1] for word in words]
        figures = dict(browser.execute_script(lines, ".figures dd:not(.note)"))
        assert figures["46 min 11 s"] == 1
        assert browser.execute_script(FIGURES) == []
        assert browser.execute_script(LAYOUT)["overflow"] is False


@pytest.mark.parametrize("width", [390, 1280])
def test_a_verifications_page_fits_and_can_be_read(
    browser: Chrome, tmp_path: Path, width: int
) -> None:
    long = {"verdict": f"different: 1 cause: {LONG}", "not_seen": [LONG]}
    line = {"file": f"/home/me/{LONG}.py", "line": 1, "code": f"{LONG} = {LONG}()"}
    finding = {**FINDING, "what": LONG, "lines": [line]}
    for found in (FOUND, {**RESUMED, **long, "findings": [finding], "saved": [LONG]}):
        page = write_verification(found, tmp_path / "page.html")
        open_file(browser, page, width=width, scheme="dark")
        seen = browser.execute_script(LAYOUT)
        assert (seen["touching"], seen["outside"], seen["overflow"]) == ([], [], False)
        assert (seen["small"], seen["unnamed"]) == (0, 0)
        assert browser.execute_script(CONTRAST)[1] >= 4.5
        assert requested(browser) == [page.as_uri()]
        assert browser.get_log("browser") == []
