"""The page in a real Chromium: nothing is fetched, nothing overflows, dark mode is dark."""

import json
import os
import shutil
from collections.abc import Callable, Iterator

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

from paceline.config.rundir import RunDirectory
from paceline.report.run import write_run_report

pytestmark = pytest.mark.browser
MakeRun = Callable[..., RunDirectory]

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def find_program(*names: str) -> str:
    for name in names:
        if path := shutil.which(name):
            return path
    message = f"{' or '.join(names)} is missing"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    options = ChromeOptions()
    options.binary_location = find_program("chromium", "chromium-browser", "google-chrome")
    profile = tmp_path_factory.mktemp("profile")
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    driver = Chrome(options=options, service=Service(find_program("chromedriver")))
    yield driver
    driver.quit()


def emulate(browser: Chrome, *, width: int, scheme: str) -> None:
    screen = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def open_page(browser: Chrome, run: RunDirectory, *, width: int, scheme: str = "light") -> None:
    for kind in ("performance", "browser"):
        browser.get_log(kind)  # Forget the pages before.
    emulate(browser, width=width, scheme=scheme)
    browser.get(write_run_report(run).as_uri())
    opened = "document.querySelectorAll('details').forEach(d => d.open = true)"
    browser.execute_script(opened)


def failed_run(make_run: MakeRun) -> RunDirectory:
    run = make_run(because=None)
    long_line = "x" * 400
    record = {"kind": "job", "message": long_line, "traceback": long_line, "host": "h" * 80}
    (run.logs / "failure-rank-0.json").write_text(json.dumps(record))
    return run


def requested(browser: Chrome) -> list[str]:
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [e["params"] for e in events if e["method"] == "Network.requestWillBeSent"]
    page = browser.current_url  # Chromium's own start page may still be loading its parts.
    return [params["request"]["url"] for params in sent if params["documentURL"] == page]


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


@pytest.mark.parametrize("width", [320, 360, 768, 1200])
@pytest.mark.parametrize("failed", [False, True])
def test_no_horizontal_overflow(
    browser: Chrome, make_run: MakeRun, width: int, failed: bool
) -> None:
    open_page(browser, failed_run(make_run) if failed else make_run(), width=width)
    script = "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    needed, there = browser.execute_script(script)
    assert needed <= there <= width  # A scroll bar at the side may take some.


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


CONTRAST = """
    const parse = c => c.match(/[\\d.]+/g).slice(0, 3).map(Number);
    const shine = c => { const [r, g, b] = parse(c).map(v => {
        v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
        return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
    const paper = shine(getComputedStyle(document.body).backgroundColor);
    const ratios = [...document.querySelectorAll('body *')].map(element => {
        const style = getComputedStyle(element);
        const own = element instanceof SVGTextElement ? style.fill : style.color;
        const other = shine(own);
        return (Math.max(paper, other) + 0.05) / (Math.min(paper, other) + 0.05); });
    return [getComputedStyle(document.body).backgroundColor, Math.min(...ratios)];
"""
# The contrast ratio of WCAG 2.2, "relative luminance" and success criterion 1.4.3.


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


def test_headings_tables_and_pictures_are_named(browser: Chrome, make_run: MakeRun) -> None:
    open_page(browser, make_run(), width=1200)
    assert "digits" in browser.title
    script = """return {
        lang: document.documentElement.lang,
        h1: document.querySelectorAll('h1').length,
        unnamed: document.querySelectorAll('svg:not([aria-label]), th:not([scope])').length}"""
    assert browser.execute_script(script) == {"lang": "en", "h1": 1, "unnamed": 0}


def test_print_shows_the_folded_parts(browser: Chrome, make_run: MakeRun) -> None:
    run = make_run(done=20, because="epochs")  # More epochs than are unfolded at first.
    browser.get(write_run_report(run).as_uri())
    rows = "return document.querySelector('details tbody').getBoundingClientRect().height"
    assert browser.execute_script("return document.querySelector('details').open") is False
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    printed = browser.execute_script(rows)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert printed > 100
