"""A study's `report.html` exists, is safe and whole, whatever the study left behind."""

import json
import re
from pathlib import Path
from typing import cast

import pytest

from paceline.cli.app import main
from paceline.report.scaling.page import write_scaling_report
from tests.report.scaling.studies import Record, study_record, write_study
from tests.report.test_page import NASTY, outline


def page_of(directory: Path, record: Record) -> str:
    path = write_scaling_report(write_study(directory, record))
    assert path == directory / "report.html"
    return path.read_text()


@pytest.mark.parametrize(
    ("workers", "methods", "more", "pictures"),
    [
        ((1,), ("allreduce",), False, 4),
        ((1, 2, 4), ("allreduce", "powersgd"), True, 6),
        ((1, 2, 4, 8, 16, 32, 64, 128), ("allreduce",), True, 6),
    ],
    ids=["1", "3", "8"],
)
@pytest.mark.core_cases(2)
def test_a_page_is_self_contained(
    tmp_path: Path, workers: tuple[int, ...], methods: tuple[str, ...], more: bool, pictures: int
) -> None:
    page = page_of(tmp_path, study_record(workers, methods, train=more, predict=more))
    found = outline(page)
    assert found.tags.count("svg") == pictures
    assert found.tags.count("script") == 1
    assert len(found.ids) == len(set(found.ids))
    assert all(link.startswith(("#", "data:")) for link in found.links)
    assert {link[1:] for link in found.links if link.startswith("#")} <= set(found.ids)
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)
    used = set(re.findall(r"var\((--[\w-]+)", page))
    assert used <= set(re.findall(r"(--[\w-]+):", page))


def test_the_same_study_gives_the_same_page(tmp_path: Path) -> None:
    record = study_record((1, 2), predict=True)
    assert page_of(tmp_path, record) == page_of(tmp_path, record)


def test_the_studys_table(tmp_path: Path) -> None:
    page = page_of(tmp_path, study_record((1, 8), train=True))
    row = re.findall(r'<th scope="row">8</th>(.*?)</tr>', page)[-1]
    cells = re.findall(r"<td>(.*?)</td>", row)
    assert cells[:5] == ["8", "2.83e-4", "256", "81", "2:19"]
    assert cells[5:7] == ["155 (152 to 158)", "49 % (48 to 50)"]
    assert "87.30 %" in cells
    assert "0.4351" in cells


def test_everything_is_escaped(tmp_path: Path) -> None:
    record = study_record((1, 2), ("powersgd",), train=True, predict=True)
    record |= {"recipe": NASTY, "command": [NASTY], "hosts": [NASTY], "notes": [NASTY]}
    record["versions"] = {NASTY: NASTY}
    for size in cast("list[Record]", record["sizes"]):
        size |= {"problem": NASTY, "method": NASTY, "parts": None}
        cast("list[Record]", size["repeats"])[0]["problem"] = NASTY
    prediction = cast("Record", record["prediction"])
    prediction |= {"text": [NASTY], "link": {"source": NASTY}}
    cast("list[Record]", prediction["methods"])[0]["method"] = NASTY + "2"
    page = page_of(tmp_path, record)
    assert page.count("<script") == 1  # ours
    assert "&lt;script&gt;alert(1)" in page


def broken(value: object) -> list[Record]:
    """The whole study, and each of its parts, with a value of the wrong kind in every place."""
    record = study_record((1, 2), train=True, predict=True)
    size = cast("list[Record]", record["sizes"])[1]
    prediction = cast("Record", record["prediction"])
    return [
        {**dict.fromkeys(record, value), "format": 1},
        {**record, "sizes": [dict.fromkeys(size, value) | {"workers": 2}, value]},
        {
            **record,
            "sizes": [
                {name: _inside(content, value) for name, content in size.items()},
            ],
            "prediction": {n: [dict.fromkeys(("method", "sizes"), value)] for n in prediction},
        },
    ]


def _inside(content: object, value: object) -> object:
    if isinstance(content, dict):
        return dict.fromkeys(content, value)
    return [value, {"problem": value, "val_loss": value}] if isinstance(content, list) else content


@pytest.mark.parametrize("value", [None, "text", {"a": []}, True, -1, 1e308], ids=repr)
def test_values_of_the_wrong_type(tmp_path: Path, value: object) -> None:
    for record in broken(value):
        assert page_of(tmp_path, record).endswith("</html>")


def test_a_torn_file_and_none(tmp_path: Path) -> None:
    content = json.dumps(study_record())
    (tmp_path / "study.json").write_text(content[: len(content) // 2])
    assert "isn&#39;t valid JSON" in write_scaling_report(tmp_path).read_text()
    (tmp_path / "study.json").unlink()
    assert "study.json is missing or empty" in write_scaling_report(tmp_path).read_text()


def test_the_command_chooses_by_what_the_directory_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_study(tmp_path, study_record((1,)))
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
    assert "Paceline scaling study" in (tmp_path / "report.html").read_text()
    (tmp_path / "study.json").unlink()
    assert main(["report", str(tmp_path)]) == 2
    assert "no run.json) and no scaling study (no study.json)" in capsys.readouterr().err
