"""`paceline --completion SHELL`: what the shell itself makes of it."""

import subprocess
from pathlib import Path

import pytest

from paceline.cli.app import COMMANDS, main
from paceline.cli.completion import completion_script
from paceline.errors import ExitCode
from paceline.training.config import training_options

_ASK = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
_paceline_or_run
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.slow
def test_what_bash_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--completion", "bash"]) == ExitCode.DONE
    (tmp_path / "script").write_text(capsys.readouterr().out)
    (tmp_path / "runs" / "first").mkdir(parents=True)
    for name in ("fifth", "of two words"):
        (tmp_path / "runs" / name).mkdir()
        (tmp_path / "runs" / name / "run.json").touch()

    def complete(line: str) -> set[str]:
        words = ["bash", "-c", _ASK, "bash", "./script", *line.split(" ")]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stderr == ""
        return set(done.stdout.split())

    assert complete("paceline ") >= set(COMMANDS)
    assert complete("paceline re") == {"resume", "report", "recipes"}
    assert complete("paceline train fa") == {"fashion-wideresnet"}
    assert complete("paceline train digits --drop") == {"--drop-last", "--dropout"}
    assert complete("paceline train mnist --data") == {"--data-dir"}
    assert complete("paceline train digits --precision b") == {"bf16"}
    assert complete("paceline scale digits --repe") == {"--repeats"}
    assert complete("paceline resume runs/f") == {"runs/fifth", "runs/first"}
    assert complete("paceline resume fi") == {"fifth"}
    assert complete("paceline compare fifth of") == {"of\\", "two\\", "words"}
    assert complete("paceline train fi") == complete("paceline export fifth --fi") == set()


@pytest.mark.parametrize("shell", ["zsh", "fish"])
@pytest.mark.slow
def test_other_shells_have_every_option(shell: str) -> None:
    script = completion_script(shell, {"train": ("paceline.cli.commands.train", "Train.")})
    for name in training_options():
        assert name.replace("_", "-") in script


def test_unknown_shells(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--completion", "tcsh"]) == ExitCode.USAGE
    assert "unknown shell 'tcsh'. Known: bash, fish, zsh" in capsys.readouterr().err
    assert main(["--completion"]) == ExitCode.USAGE
    assert "name the shell: paceline --completion bash, zsh or fish" in capsys.readouterr().err
