"""Pages in a real Chromium: how tests start it, open a file, and look at what was asked for."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

from tests.support.needs import BROWSER, find_browser, need

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


@contextmanager
def start_browser(profile: Path) -> Iterator[Chrome]:
    options = ChromeOptions()
    need(BROWSER)
    options.binary_location = find_browser()
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    driver = Chrome(options=options, service=Service(shutil.which("chromedriver")))
    yield driver
    driver.quit()


def emulate(browser: Chrome, *, width: int, scheme: str) -> None:
    screen = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def open_file(browser: Chrome, page: Path, *, width: int, scheme: str = "light") -> None:
    for kind in ("performance", "browser"):
        browser.get_log(kind)  # Forget the pages before.
    emulate(browser, width=width, scheme=scheme)
    browser.get(page.as_uri())
    opened = "document.querySelectorAll('details').forEach(d => d.open = true)"
    browser.execute_script(opened)


def requested(browser: Chrome) -> list[str]:
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [e["params"] for e in events if e["method"] == "Network.requestWillBeSent"]
    page = browser.current_url  # Chromium's own start page may still be loading its parts.
    return [params["request"]["url"] for params in sent if params["documentURL"] == page]


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

HINTS = """
    return [...document.querySelectorAll('.scroll')].map(box => {
        const told = box.previousElementSibling?.classList.contains('swipe') ?? false;
        const table = box.querySelector('table'), width = table.style.width;
        table.style.width = 'max-content';
        const over = table.getBoundingClientRect().width - box.clientWidth;
        table.style.width = width;
        return [box.getAttribute('aria-label'), Math.round(over), told]; })
        .filter(([, over, told]) => told ? over < -60 : over > 60);
"""
"""Tables that go far to the side without a word of it, or have the word and fit easily."""

LAYOUT = """
    const boxes = [...document.querySelectorAll('.chart svg')].map(
        svg => [...svg.querySelectorAll('text')].map(
            t => [t.textContent, t.getBoundingClientRect()]));
    const apart = (a, b) => a.right <= b.left + 1 || b.right <= a.left + 1
        || a.bottom <= b.top + 3 || b.bottom <= a.top + 3;
    const touching = boxes.flatMap(texts => texts.flatMap(([name, a], i) =>
        texts.slice(i + 1).filter(([, b]) => !apart(a, b)).map(([other]) => name + ' / ' + other)));
    const width = document.documentElement.clientWidth;
    return {
        touching,
        outside: boxes.flat().filter(([, b]) => b.left < 0 || b.right > width).map(([n]) => n),
        overflow: document.documentElement.scrollWidth > width,
        small: boxes.flat().filter(([, b]) => b.height < 9).length,
        unnamed: document.querySelectorAll('svg:not([aria-label]), th:not([scope])').length}
"""


def find_faults(browser: Chrome, width: int) -> list[str]:
    """Say what is wrong with the page that is open: its layout, its contrast, what it complains of.

    Args:
        browser: A browser with a page that has just been opened.
        width: Of the window, in pixels.
    """
    layout = browser.execute_script(LAYOUT)
    _, contrast = browser.execute_script(CONTRAST)
    found = {
        "texts that touch": layout["touching"],
        "cut off": layout["outside"],
        "wider than the window": layout["overflow"],
        "pictures or headings without a name": layout["unnamed"],
        "contrast below 4.5": contrast < 4.5 and contrast,
        "tables without a hint that they go on": width < 500 and browser.execute_script(HINTS),
        "complaints": [entry["message"] for entry in browser.get_log("browser")],
    }
    return [f"{what}: {where}" for what, where in found.items() if where]
