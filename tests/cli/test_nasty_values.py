"""Values that no option can have are refused in a sentence, before anything is written."""

from pathlib import Path

import pytest

from paceline.cli.app import main
from paceline.errors import ExitCode
from paceline.runtime.spec import Launch


@pytest.mark.parametrize(
    "words",
    [
        ("--timeout-s", "nan"),
        ("--lr", "1e308"),
        ("--hosts", "a:" + "9" * 5000),
        ("--workers", "1000000"),
        ("--run-dir", ""),
        ("--run-dir", "a\0b"),
    ],
)
def test_the_command_ends_with_2(
    words: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "digits", *words]) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert said.startswith("paceline: ")
    assert "Traceback" not in said
    assert len(said) < 1500
    assert list(tmp_path.iterdir()) == []


def test_what_is_within_the_limits_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def start(launch: Launch) -> int:
        started.append(launch)
        return ExitCode.DONE

    monkeypatch.setattr("paceline.runtime.start.start", start)
    words = ("--lr", "1e6", "--timeout-s", "86400", "--seed", str(2**63 - 1), "--epochs", "1000000")
    assert main(["train", "digits", *words]) == ExitCode.DONE
    assert len(started) == 1
