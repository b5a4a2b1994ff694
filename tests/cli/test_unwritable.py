"""Places that can't be written: every command says so in a line, and ends with the same code."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from paceline.cli.app import main
from paceline.errors import ExitCode
from tests.support.small_files import small_files

_GOLDEN = Path(__file__).parents[1] / "results" / "golden"
_TO_A_FILE = (
    "report run --html {}.html",
    "report study --html {}.html",
    "compare run other --html {}.html",
)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, golden in (("run", "run"), ("other", "run"), ("study", "study")):
        shutil.copytree(_GOLDEN / golden, tmp_path / name)
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    monkeypatch.chdir(tmp_path)


def _ends(words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Give a command's exit code and what it says, which is one line."""
    before = sorted(Path().rglob("*"))
    code = main(words.split())
    said = capsys.readouterr().err
    assert said.startswith("paceline: ")
    assert "Traceback" not in said
    assert sorted(Path().rglob("*")) == before  # nothing is left behind
    return code, said


@pytest.mark.parametrize("words", [_TO_A_FILE[0], "init recipe {}", "report run"])
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.EACCES, ExitCode.USAGE),
        (errno.ENOSPC, ExitCode.INFRASTRUCTURE),
    ],
)
def test_a_file_system_that_refuses(
    number: int,
    code: ExitCode,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(number, os.strerror(number), "below")

    monkeypatch.setattr(os, "fsync", refuse)
    if words.startswith("init"):  # a new directory, which isn't synced
        monkeypatch.setattr(Path, "mkdir", refuse)
    said = _ends(words.format("new"), capsys)
    assert said[0] == code
    assert f"can't be written: {os.strerror(number)}" in said[1]


@pytest.mark.parametrize("place", ["new", "full"])
def test_a_project_for_which_the_disk_is_too_small_leaves_nothing(
    place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_files(400):
        code, said = _ends(f"init recipe {place}", capsys)
    assert (code, f"{place} can't be written: File too large" in said) == (70, True)


@pytest.mark.parametrize("words", [*_TO_A_FILE, "init recipe {}"])
def test_a_place_below_a_file(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _ends(words.format("file/new"), capsys)[0] == ExitCode.USAGE


@pytest.mark.parametrize("words", _TO_A_FILE)
def test_a_directory_in_the_files_place(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = words.format("full/new").split()[-1]
    Path(name).mkdir()
    assert _ends(words.format("full/new"), capsys)[0] == ExitCode.USAGE
