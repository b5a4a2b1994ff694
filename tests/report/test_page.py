"""`report.html` exists, is safe and small, whatever the run left behind."""

import base64
import hashlib
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from paceline.report.page import write_run_report
from paceline.results.confusion import Confusion
from paceline.results.run_directory import RunDirectory
from tests.report.conftest import metrics_row, write_metrics

MakeRun = Callable[..., RunDirectory]

GOLDEN_PROFILE = Path(__file__).parent.parent / "results" / "golden" / "run" / "profile.json"
NASTY = "<script>alert(1)</script>\"'&{{ 7 * 7 }}\x1b[2J"


class Outline(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href"):
                self.links.append(value or "")


def page_of(run: RunDirectory) -> str:
    path = write_run_report(run)
    assert path == run.report_html
    return path.read_text()


def outline(page: str) -> Outline:
    parser = Outline()
    parser.feed(page)
    parser.close()
    return parser


@pytest.mark.parametrize("because", ["epochs", "target", "signal", None])
@pytest.mark.core_cases(2)
def test_a_page_is_self_contained(make_run: MakeRun, because: str | None) -> None:
    page = page_of(make_run(because=because))
    found = outline(page)
    assert found.tags.count("svg") == 6
    assert found.tags.count("script") == 1
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'\">" in page  # this one may run, and nothing else
    assert len(found.ids) == len(set(found.ids))
    assert all(link.startswith(("#", "data:")) for link in found.links)
    assert {link[1:] for link in found.links if link.startswith("#")} <= set(found.ids)
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)


def test_the_same_run_gives_the_same_page(make_run: MakeRun) -> None:
    run = make_run()
    assert page_of(run) == page_of(run)


def test_everything_is_escaped(make_run: MakeRun) -> None:
    run = make_run(because=None)
    description = json.loads(run.run_json.read_text())
    for name in ("settings", "recipe_arguments", "derived", "versions"):
        description[name][NASTY] = NASTY
    description |= {"recipe": NASTY, "command": [NASTY], "given": [NASTY], "started_at": NASTY}
    description["hosts"] = [{"host": NASTY, "cpu": NASTY, "ranks": [NASTY]}]
    description["history"] += [{"reason": NASTY, "started_at": NASTY}]
    run.run_json.write_text(json.dumps(description))
    record = dict.fromkeys(("host", "error_type", "message", "traceback", "operation"), NASTY)
    (run.logs / "failure-rank-0.json").write_text(json.dumps({**record, "kind": "job"}))
    (run.snapshots / f"step-{NASTY.replace('/', '')}").mkdir()
    (run.path / "evaluation").mkdir()
    confusion = Confusion(classes=(NASTY, f"{NASTY}2"), counts=((1, 2), (3, 4)), snapshot=NASTY)
    confusion.write(run.path / "evaluation" / "confusion.json")
    page = page_of(run)
    assert page.count("<script") == 1  # ours
    assert "&lt;script&gt;alert(1)" in page
    assert "49" not in re.sub(r"<svg.*?</svg>", "", page, flags=re.DOTALL).partition("Curves")[0]


def test_two_hundred_epochs_stay_small(make_run: MakeRun) -> None:
    assert len(page_of(make_run(done=200, epochs=200, because="epochs"))) < 400_000


def test_thousands_of_epochs_are_thinned(make_run: MakeRun) -> None:
    page = page_of(make_run(done=3000, epochs=3000, because="epochs"))
    assert len(page) < 600_000
    assert "of 3,000 epochs; metrics.csv has all" in page


@pytest.mark.slow
def test_the_users_settings_come_first_and_the_others_are_folded(make_run: MakeRun) -> None:
    run = make_run()
    page = page_of(run)
    assert "1a2b3c4d5e6f, with changes" in page
    given = re.findall(r'<tr class="given"><th scope="row">(\w+)', page)
    assert given == ["epochs", "lr", "workers"]
    own, _, folded = page.partition('<details class="rest">')
    assert "momentum" not in own
    assert "momentum" in folded
    assert "others by default or by the recipe" in page
    run.run_json.write_text(json.dumps({**run.read_run(), "kind": "script"}))
    assert "others by default or by the script" in page_of(run)


def test_the_caption_speaks_of_times_where_there_are_some(make_run: MakeRun) -> None:
    caption = "Along the top: training time."
    run = make_run()
    assert caption in page_of(run)
    short = [metrics_row(epoch, 20) | {"time_s": epoch / 100} for epoch in range(1, 5)]
    write_metrics(run.metrics_csv, short)
    assert caption not in page_of(run)


def test_time_and_classes_are_shown(make_run: MakeRun) -> None:
    run = make_run()
    run.profile_json.write_bytes(GOLDEN_PROFILE.read_bytes())
    (run.path / "evaluation").mkdir()
    confusion = Confusion(classes=("cat", "dog"), counts=((8, 2), (1, 4)), snapshot="step-9")
    confusion.write(run.path / "evaluation" / "confusion.json")
    page = page_of(run)
    assert "Time of a step by worker" in page
    assert "Evaluation of snapshot step-9: 12 of 15 samples right (80.00 %)." in page
    assert 'title="2 of 10 samples of cat taken for dog (20 %)">2<' in page
    assert '<td class="figure">88.89 %</td>' in page  # the precision of cat: 8 of 9


def test_charts_of_a_row_have_one_width(make_run: MakeRun) -> None:
    run = make_run(top5=False)
    assert '<div class="charts thirds">' in page_of(run)  # two large ones above three in a row
    # A regression has no accuracy: loss, the only large one, shares its row with a small one.
    text = run.metrics_csv.read_text()
    header, *rows = [line.split(",") for line in text.splitlines()]
    left = [place for place, name in enumerate(header) if "accuracy" not in name]
    lines = [",".join(row[place] for place in left) for row in [header, *rows]]
    run.metrics_csv.write_text("\n".join(lines) + "\n")
    assert '<div class="charts">' in page_of(run)


def test_a_failure_is_shown_whole(make_run: MakeRun) -> None:
    run = make_run(because=None)
    lines = "\n".join(f"  line {n}" for n in range(300))
    record = {"rank": 0, "kind": "job", "message": "no", "traceback": lines}
    (run.logs / "failure-rank-0.json").write_text(json.dumps(record))
    assert lines in page_of(run)


@pytest.mark.parametrize("missing", ["run.json", "metrics.csv", "summary.json", "all"])
@pytest.mark.core_cases(2)
def test_missing_files(make_run: MakeRun, missing: str) -> None:
    run = make_run()
    for name in ("run.json", "metrics.csv", "summary.json"):
        if missing in (name, "all"):
            (run.path / name).unlink()
    assert page_of(run).endswith("</html>")


@pytest.mark.parametrize("value", [None, "text", -1])
@pytest.mark.core_cases(2)
def test_values_of_the_wrong_type(make_run: MakeRun, value: object) -> None:
    run = make_run(done=2)
    for path in (run.run_json, run.summary_json):
        content = json.loads(path.read_text())
        path.write_text(json.dumps(dict.fromkeys(content, value)))
    assert page_of(run).endswith("</html>")
    nested = {"epochs": value, "steps_per_epoch": value, "started_at": value, "from_step": value}
    lists = {name: [value, nested] for name in ("history", "hosts", "given", "command")}
    objects = dict.fromkeys(("settings", "derived", "versions", "recipe_arguments"), nested)
    run.run_json.write_text(json.dumps({**lists, **objects}))
    assert page_of(run).endswith("</html>")


def test_an_unwritable_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        write_run_report(RunDirectory(tmp_path / "missing"))
