"""The page of a comparison: whole by itself, safe, and written over nothing else."""

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.report.runs.comparison import choose_runs, compare, write_comparison
from tests.report.runs.conftest import MakeRun
from tests.report.test_page import NASTY, Outline


def page_of(folder: Path) -> str:
    return write_comparison(compare(choose_runs([str(folder)])), folder / "c.html").read_text()


def test_a_comparison_has_curves_differences_and_links(make_run: MakeRun, folder: Path) -> None:
    for name, lr in (("a", 0.1), ("b #1: 100%", 0.2)):
        make_run(name, run={"settings": {"lr": lr}}).report_html.touch()
    make_run("c").logs.mkdir()
    page = page_of(folder)
    found = Outline()
    found.feed(page)
    assert [link for link in found.links if not link.startswith("data:")] == [
        "a/report.html",
        "b%20%231%3A%20100%25/report.html",
    ]
    assert found.tags.count("svg") == 3
    assert len(found.ids) == len(set(found.ids))
    assert '<th scope="row">lr</th><td>0.1</td><td>0.2</td><td>0.05</td>' in page
    assert "Training loss. A: from 2.105 to 1.001; B: from 2.105 to 1.001" in page
    assert page == page_of(folder)  # over its own


def test_a_pages_own_script_alone_may_run(make_run: MakeRun, folder: Path) -> None:
    for name in "ab":
        make_run(name)
    page = page_of(folder)
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src "
    assert f"{policy}'sha256-{digest}'\"" in page


def test_text_of_a_run_becomes_no_markup(make_run: MakeRun, folder: Path) -> None:
    first = make_run("a", run={"recipe": NASTY, "settings": {"name": NASTY, NASTY: NASTY}})
    make_run("b", run={"versions": {NASTY: NASTY}}, summary={"figures": {NASTY: 1.0}})
    first.summary_json.write_text(json.dumps({"stopped_because": NASTY}))
    page = page_of(folder)
    assert "<script>alert" not in page
    assert "\x1b" not in page
    assert "49" not in re.sub(r"<(svg|style).*?</\1>", "", page, flags=re.DOTALL)


def test_a_page_is_written_over_nothing_else(make_run: MakeRun, folder: Path) -> None:
    make_run("a")
    make_run("b")
    shown = compare(choose_runs([str(folder)]))
    (folder / "own.html").write_text("<html>my own</html>")
    for path, why in (("own.html", "is there"), ("a", "is there"), ("no/c.html", "can't be")):
        with pytest.raises(UsageError, match=why):
            write_comparison(shown, folder / path)
    assert (folder / "own.html").read_text() == "<html>my own</html>"


def test_a_comparison_without_epochs_says_so(make_run: MakeRun, folder: Path) -> None:
    for name in "ab":
        make_run(name, ended=None).metrics_csv.unlink()
    page = page_of(folder)
    assert "nothing to draw" in page
    assert "No setting differs" in page
