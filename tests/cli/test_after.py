"""What can be done with a run: evaluate, export, report."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.checkpoint.fingerprint import weights_sha256
from paceline.cli.app import main
from paceline.errors import ExitCode
from tests.cli.conftest import Paceline, summary


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("trained")
    command = "train digits --on here --epochs 3 --target-accuracy none --run-dir"
    done = Paceline(directory).run(*command.split(), directory / "run")
    assert done.code == 0, done.err
    return directory / "run"


def test_evaluate(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(run), "--snapshot", "last"]) == ExitCode.DONE
    shown = capsys.readouterr().out
    assert "355, each counted once" in shown
    assert f"{float(str(summary(run)['val_accuracy'])):.2%}" in shown
    assert (run / "evaluation" / "confusion.png").read_bytes().startswith(b"\x89PNG")
    counts = json.loads((run / "evaluation" / "confusion.json").read_text())["counts"]
    assert sum(map(sum, counts)) == 355


def test_evaluate_another_snapshot(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = min(run.glob("snapshots/step-*"))
    assert main(["evaluate", str(run), "--snapshot", str(first)]) == ExitCode.DONE
    assert first.name in capsys.readouterr().out
    assert main(["evaluate", str(run), "--snapshot", "middle"]) == ExitCode.USAGE
    assert main(["evaluate", str(run), "--data-dir", "elsewhere"]) == ExitCode.USAGE
    assert "data_dir" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_export(run: Path, tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"weights.{suffix}"
    assert main(["export", str(run), str(file), "--snapshot", "last"]) == ExitCode.DONE
    weights = load_file(file) if suffix == "safetensors" else torch.load(file, weights_only=True)
    assert weights_sha256(weights) == summary(run)["weights_sha256"]
    assert not any(name.startswith("module.") for name in weights)
    assert main(["export", str(run), str(file)]) == ExitCode.USAGE
    assert main(["export", str(run), str(file), "--overwrite"]) == ExitCode.DONE


def test_report_again(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "report.html").unlink()
    assert main(["report", str(run)]) == ExitCode.DONE
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert "digits" in (run / "report.html").read_text()


def test_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == ExitCode.DONE
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown[:3]] == ["digits", "mnist", "synthetic"]
    assert all(len(line.split()) > 4 for line in shown[:3])
