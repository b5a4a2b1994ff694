"""Places that a command can hardly be in: names that aren't UTF-8, a directory that is gone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.app import main
from paceline.errors import ExitCode
from tests.cli.conftest import Paceline

_SHORT = ("train", "digits", "--workers", "1", "--epochs", "1", "--global-batch", "256")


@pytest.mark.slow
def test_a_run_directory_whose_name_is_not_utf8(cold_paceline: Paceline, tmp_path: Path) -> None:
    run = os.fsdecode(os.fsencode(tmp_path) + b"/x\xe9 \x1b[31m")
    for command in (
        (*_SHORT, "--run-dir", run),
        ("resume", run, "--epochs", "2", "--allow-change", "epochs"),
        ("export", run, f"{run}/x.pt"),
        ("report", run),
    ):
        ended = cold_paceline.run(*command, env={"PYTHONUTF8": "0", "LC_ALL": "C.UTF-8"})
        assert ended.code == ExitCode.DONE, ended.err
        assert "\x1b" not in ended.out + ended.err
        assert "Traceback" not in ended.err
    assert r"x\xe9 \x1b[31m" in ended.out


def test_a_working_directory_that_is_gone(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    command = [sys.executable, "-P", "-m", "paceline", *_SHORT]
    ended = subprocess.run(
        ["sh", "-c", 'cd "$0" && rmdir "$0" && exec "$@"', str(gone), *command],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == ExitCode.USAGE, ended.stderr
    assert "the working directory has been removed" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_name_is_shown_without_being_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (("evaluate", "\x1b]0;owned\x07"), ("\x1b[2J",), ("train", "\x1b[2J")):
        assert main(words) == ExitCode.USAGE
        said = capsys.readouterr().err
        assert "\x1b" not in said
        assert r"\x1b" in said
