"""`paceline --completion SHELL`: what the shell itself makes of it."""

import subprocess
from pathlib import Path

import pytest

from paceline.cli.app import COMMANDS, main
from paceline.cli.completion import completion_script
from paceline.errors import ExitCode
from paceline.training.config import training_options
from tests.launch.waiting import patient
from tests.support.needs import FISH, ZSH, need

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


_ASK_ZSH = """
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell "$1"
zpty -n -w shell "$2"$'\\t'
zpty -r -m shell seen "*$3*"
"""
"""Types a line and a tab in an interactive shell, and waits until it shows something."""


@pytest.mark.parametrize(
    "reads", ["fpath=($PWD $fpath); autoload -U compinit; compinit -u -D", "source ./_paceline"]
)
@pytest.mark.slow
def test_what_zsh_completes(reads: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    need(ZSH)
    assert main(["--completion", "zsh"]) == ExitCode.DONE
    (tmp_path / "_paceline").write_text(capsys.readouterr().out)
    (tmp_path / "runs" / "fifth").mkdir(parents=True)
    (tmp_path / "runs" / "fifth" / "run.json").touch()

    def complete(line: str, whole: str) -> None:
        words = ["zsh", "-f", "-c", _ASK_ZSH, "zsh", reads, line, whole]
        subprocess.run(words, cwd=tmp_path, timeout=patient(30), check=True)

    complete("paceline rep", "report")
    complete("paceline train fa", "fashion-wideresnet")
    complete("paceline resume fi", "fifth")
    complete("paceline compare other fi", "fifth")
    complete("paceline train --config _pa", "_paceline")


@pytest.mark.slow
def test_what_fish_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    need(FISH)
    assert main(["--completion", "fish"]) == ExitCode.DONE
    (tmp_path / "paceline.fish").write_text(capsys.readouterr().out)
    (tmp_path / "runs" / "fifth").mkdir(parents=True)
    (tmp_path / "runs" / "fifth" / "run.json").touch()

    def complete(line: str) -> set[str]:
        words = ["fish", "--no-config", "-c", "source paceline.fish; complete -C $argv[1]", line]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stderr == ""
        return {line.split("\t")[0] for line in done.stdout.splitlines()}

    assert complete("paceline re") == {"resume", "report", "recipes"}
    assert complete("paceline resume fi") == complete("paceline compare fifth fi") == {"fifth"}
    assert complete("paceline train fif") == set()


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
