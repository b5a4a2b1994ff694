"""The pages about several runs: whole by themselves, safe, and written over nothing else."""

import base64
import hashlib
import json
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.report.runs.comparison import choose_runs, compare
from paceline.report.runs.listing import list_runs, places_of
from paceline.report.runs.pages import write_comparison, write_index
from tests.report.runs.conftest import MakeRun
from tests.report.test_page import NASTY, Outline

NOW = datetime(2026, 3, 3, 9, 15, tzinfo=UTC)


def index_of(folder: Path) -> str:
    return write_index(list_runs(folder), NOW).read_text()


def outline(page: str) -> Outline:
    found = Outline()
    found.feed(page)
    return found


def test_the_index_links_to_the_reports_that_are_there(make_run: MakeRun, folder: Path) -> None:
    make_run("plain")
    make_run("study/trained/a #1: 100%").report_html.touch()
    make_run("b").report_html.touch()
    make_run("c").run_json.unlink()
    page = index_of(folder)
    assert [link for link in outline(page).links if not link.startswith("data:")] == [
        "b/report.html",
        "study/trained/a%20%231%3A%20100%25/report.html",
    ]
    assert "c: run.json is missing or empty" in page
    assert '<span class="state failed">damaged</span>' in page


def test_a_pages_own_script_alone_may_run(make_run: MakeRun, folder: Path) -> None:
    compared = compare(choose_runs([str(make_run(name).path) for name in "ab"]))
    for page in (index_of(folder), write_comparison(compared, folder / "c.html").read_text()):
        (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src "
        assert f"{policy}'sha256-{digest}'\"" in page
    assert not re.search(r"https?://|@import|url\(", index_of(folder))


def test_nobodys_text_becomes_markup(make_run: MakeRun, folder: Path) -> None:
    notes = {"name": NASTY, "tag": [NASTY], "note": NASTY, NASTY: NASTY}
    first = make_run("a", run={"recipe": NASTY, "settings": notes})
    second = make_run("b", run={"versions": {NASTY: NASTY}}, summary={"figures": {NASTY: 1.0}})
    first.summary_json.write_text(json.dumps({"stopped_because": NASTY}))
    compared = compare(choose_runs([str(first.path), str(second.path)]))
    for page in (index_of(folder), write_comparison(compared, folder / "c.html").read_text()):
        assert "<script>alert" not in page
        assert "\x1b" not in page
        assert "49" not in re.sub(r"<(svg|style).*?</\1>", "", page, flags=re.DOTALL)


def test_a_comparison_has_each_curve_over_each_way(make_run: MakeRun, folder: Path) -> None:
    runs = [make_run(name, run={"settings": {"lr": lr}}) for name, lr in (("a", 0.1), ("b", 0.2))]
    shown = compare(choose_runs([str(run.path) for run in runs]))
    page = write_comparison(shown, folder / "c.html").read_text()
    found = outline(page)
    assert found.tags.count("svg") == 9
    assert found.tags.count("script") == 1
    assert len(found.ids) == len(set(found.ids))
    for heading in ("By step", "By training time", "By samples seen"):
        assert f"<h2>{heading}</h2>" in page
    assert '<th scope="row">lr</th><td>0.1</td><td>0.2</td>' in page
    assert "Training loss. A: from 2.105 to 1.001; B: from 2.105 to 1.001" in page
    assert page == write_comparison(shown, folder / "c.html").read_text()  # over its own


def test_runs_of_one_name_are_told_apart(make_run: MakeRun, folder: Path) -> None:
    for name, lr in (("a", 0.1), ("b", 0.2), ("c", 0.3)):
        title = "try" if name != "c" else "other"
        make_run(name, run={"settings": {"lr": lr, "name": title}})
    listed = list_runs(folder)
    assert places_of(listed.entries) == ["a", "b", ""]
    pages = index_of(folder), write_comparison(compare(listed.entries), folder / "p").read_text()
    for page in pages:
        assert re.findall(r'class="place">(\w)<', page) == ["a", "b"]


def test_pages_are_written_over_nothing_else(make_run: MakeRun, folder: Path) -> None:
    make_run("a")
    (folder / "index.html").write_text("<html>my own</html>")
    with pytest.raises(UsageError, match=r"index\.html is there, and is no page of"):
        index_of(folder)
    assert (folder / "index.html").read_text() == "<html>my own</html>"
    shown = compare(list_runs(folder).entries)
    with pytest.raises(UsageError, match="is there"):
        write_comparison(shown, folder / "a")
    with pytest.raises(UsageError, match="can't be written"):
        write_comparison(shown, folder / "nowhere" / "c.html")


def test_a_comparison_without_epochs_says_so(make_run: MakeRun, folder: Path) -> None:
    runs = [make_run("a", ended=None), make_run("b", ended=None)]
    for run in runs:
        run.metrics_csv.unlink()
    page = write_comparison(compare(list_runs(folder).entries), folder / "c.html").read_text()
    assert "nothing to draw" in page
    assert "No setting differs" in page
