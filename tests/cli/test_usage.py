"""Wrong usage: a clear message, exit code 2, nothing started, nothing left behind."""

import json
import re
from pathlib import Path

import pytest

from paceline.cli.app import COMMANDS, main
from paceline.errors import ExitCode


@pytest.fixture(autouse=True)
def _in_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


_WRONG = [
    ("tran", r"unknown command 'tran'. Did you mean 'train'\? Known: .*resume"),
    ("train digit", r"unknown recipe 'digit'. Did you mean 'digits'\? Known: digits, mnist"),
    ("train digits --epoch 3", r"unknown option '--epoch'. Did you mean '--epochs'\? Known: --"),
    ("train digits --optimizer adm", r'"adm" for --optimizer. Choose from: "sgd", "adam"'),
    ("train digits --optimizer adam --momentum 0.9", r"adam has no momentum.*sgd, lars"),
    ("train digits --epochs x", r'Invalid value for --epochs: unable to convert "x" into int'),
    ("train digits --epochs 0", r"--epochs must be at least 1, not 0"),
    ("train digits extra", r"unexpected 'extra'"),
    ("train --workers 2 digits", r"unexpected 'digits': what isn't an option comes first"),
    ("train digits --global-batch 1 --workers 2", r"2 workers are more than the 1 samples"),
    ("train digits --global-batch 64 --batch-per-worker 3 --workers 2", r"disagree.*make 6"),
    ("train digits --device cuda", r"--device cuda needs a GPU, and this machine has none"),
    ("train digits --backend nccl", r"--backend nccl needs GPUs"),
    ("train digits --target-accuracy 97", r"a fraction between 0 and 1, not 97"),
    ("train digits --time-budget soon", r"not a duration: 'soon'. Write for example 90s"),
    ("train digits --keep-last 1", r"at least 2"),
    ("train nowhere.py:build", r"there is no file .*nowhere.py"),
    ("resume nowhere", r"nowhere holds no training"),
    ("resume", r"the run directory is missing. Usage: paceline resume RUN_DIR"),
    ("evaluate nowhere", r"nowhere holds no training"),
    ("export nowhere weights.pt", r"nowhere holds no training"),
    ("export somewhere", r"the file to write is missing"),
    ("report nowhere", r"nowhere holds no training"),
]


@pytest.mark.parametrize(("line", "message"), _WRONG, ids=[line for line, _ in _WRONG])
def test_wrong_usage(
    line: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "cuda" in line or "nccl" in line:
        _skip_where_gpus_are()
    assert main(line.split()) == ExitCode.USAGE
    captured = capsys.readouterr()
    assert re.search(message, captured.err), captured.err
    assert captured.out == ""
    assert list(tmp_path.iterdir()) == []


def test_existing_run_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.json").write_text(json.dumps({}))
    assert main(["train", "--run-dir", str(tmp_path)]) == ExitCode.USAGE
    assert "already holds a training" in capsys.readouterr().err


def test_unwritable_run_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["train", "--run-dir", str(tmp_path / "file" / "run")]) == ExitCode.USAGE
    assert "can't be written (Not a directory)" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == ExitCode.DONE
    assert "Usage: paceline" in capsys.readouterr().out


def test_help_shows_the_recipes_own_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "mnist", "--help"]) == ExitCode.DONE
    shown = " ".join(capsys.readouterr().out.split())
    assert "--data-dir" in shown
    assert re.search(r"--epochs INT Passes over the training set\. \[default: 5\]", shown), shown


def _skip_where_gpus_are() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
