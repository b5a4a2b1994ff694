"""A table that grows is read row by row, each once, and anew where it has been replaced."""

from pathlib import Path

import pytest

from paceline.results.growing_table import GrowingTable


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_each_complete_row_is_read_once_below_its_header(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    table = GrowingTable(path, most_bytes=1000)
    with pytest.raises(FileNotFoundError):
        table.read()
    append(path, "step,lo")
    assert table.read() == ("", True)  # the header is being written
    append(path, "ss\n")
    assert table.read() == ("", True)
    append(path, "1,0.5\n2,0.")
    assert table.read() == ("step,loss\n1,0.5\n", False)
    assert table.read() == ("", False)
    append(path, "4\n3,0.3\n")
    assert table.read() == ("step,loss\n2,0.4\n3,0.3\n", False)


@pytest.mark.parametrize("how", ["replaced", "cut"])
def test_a_resumed_trainings_shorter_table_is_read_from_its_beginning(
    how: str, tmp_path: Path
) -> None:
    path = tmp_path / "steps.csv"
    path.write_text("step,loss\n1,0.5\n2,0.4\n")
    table = GrowingTable(path, most_bytes=1000)
    assert table.read() == ("step,loss\n1,0.5\n2,0.4\n", True)
    if how == "replaced":
        (tmp_path / "new").write_text("step,loss,lr\n1,0.5,1\n2,0.4,1\n")
        (tmp_path / "new").replace(path)
        assert table.read() == ("step,loss,lr\n1,0.5,1\n2,0.4,1\n", True)
    else:
        path.write_text("step,loss\n1,0.5\n")
        assert table.read() == ("step,loss\n1,0.5\n", True)


def test_a_large_table_comes_in_parts_of_whole_rows(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text("a\n" + "".join(f"{row}\n" for row in range(100, 110)))
    table = GrowingTable(path, most_bytes=11)
    read = [table.read()[0] for _ in range(6)]
    assert [part.split()[1:] for part in read] == [
        ["100", "101"],
        ["102", "103"],
        ["104", "105"],
        ["106", "107"],
        ["108", "109"],
        [],
    ]
