"""What can be done with a run: evaluate, export, report."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.checkpoint.host_tensors import weights_sha256
from paceline.cli.app import main
from paceline.errors import ExitCode
from paceline.options.figures import show_loss, show_percent
from paceline.recipes.registry import BUILT_IN
from tests.cli.conftest import Paceline, summary

_GOLDEN = Path(__file__).parents[1] / "results" / "golden" / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("trained")
    command = "train digits --on here --epochs 3 --target-accuracy none --run-dir"
    done = Paceline(directory).run(*command.split(), directory / "run")
    assert done.code == 0, done.err
    return directory / "run"


@pytest.mark.slow
def test_evaluate(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(run), "--snapshot", "last"]) == ExitCode.DONE
    shown = capsys.readouterr().out
    assert "355, each counted once" in shown
    best = json.loads((run / "snapshots" / "best.json").read_text())["snapshot"]
    assert ("the best by validation" in shown) == (best in shown)
    assert show_percent(float(str(summary(run)["val_accuracy"]))) in shown
    assert (run / "evaluation" / "confusion.png").read_bytes().startswith(b"\x89PNG")
    counts = json.loads((run / "evaluation" / "confusion.json").read_text())["counts"]
    assert sum(map(sum, counts)) == 355
    assert shown.count("precision") == 1
    assert "taken for" in (run / "report.html").read_text()


@pytest.mark.slow
def test_evaluate_another_snapshot(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = min(run.glob("snapshots/step-*"))
    assert main(["evaluate", str(run), "--snapshot", str(first)]) == ExitCode.DONE
    assert first.name in capsys.readouterr().out
    assert main(["evaluate", str(run), "--snapshot", "middle"]) == ExitCode.USAGE
    assert main(["evaluate", str(run), "--data-dir", "elsewhere"]) == ExitCode.USAGE
    assert "data_dir" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
@pytest.mark.slow
def test_export(run: Path, tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / f"weights.{suffix}"
    assert main(["export", str(run), str(file), "--snapshot", "last"]) == ExitCode.DONE
    weights = load_file(file) if suffix == "safetensors" else torch.load(file, weights_only=True)
    assert weights_sha256(weights) == summary(run)["weights_sha256"]
    assert not any(name.startswith("module.") for name in weights)
    capsys.readouterr()
    assert main(["export", str(run), str(file)]) == ExitCode.USAGE
    assert "replace it with --overwrite" in capsys.readouterr().err
    assert main(["export", str(run), str(file), "--overwrite"]) == ExitCode.DONE


@pytest.mark.slow
def test_what_export_says_is_fitted_to_a_terminal(
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "weights.pt"
    monkeypatch.setenv("COLUMNS", str(len(str(file)) + 8))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["export", str(run), str(file)]) == ExitCode.DONE
    assert capsys.readouterr().out.endswith(f" written to\n  {file}\n")


@pytest.mark.slow
def test_a_moving_average_of_the_weights_is_what_counts(
    paceline: Paceline, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, names = tmp_path / "run", ("average.pt", "trained.pt")
    done = paceline.run(*"train digits --workers 2 --epochs 2 --ema 0.9 --run-dir".split(), run)
    assert done.code == 0, done.err
    assert "ema       decay 0.9" in done.out
    found = summary(run)
    assert found["evaluated_weights"] == "ema"
    # Judged again in one process: the average, with the figures of the training.
    assert main(["evaluate", str(run), "--snapshot", "last"]) == ExitCode.DONE
    shown = capsys.readouterr().out
    assert f"loss      {show_loss(float(str(found['val_loss'])))}" in shown
    assert main(["evaluate", str(run), "--snapshot", "last", "--no-ema"]) == ExitCode.DONE
    assert f"loss      {show_loss(float(str(found['val_loss'])))}" not in capsys.readouterr().out
    # And exported, unless the weights themselves are asked for.
    for name, more in zip(names, ([], ["--no-ema"]), strict=True):
        words = ["export", str(run), str(tmp_path / name), "--snapshot", "last", *more]
        assert main(words) == ExitCode.DONE
    average, trained = (torch.load(tmp_path / name, weights_only=True) for name in names)
    assert weights_sha256(trained) == found["weights_sha256"]
    assert average.keys() == trained.keys()
    assert weights_sha256(average) != found["weights_sha256"]
    assert "(moving average of the weights)" in capsys.readouterr().out


_WITHOUT_VALIDATION = '''
import dataclasses
from torch import nn
import paceline
from paceline.data.digits import load_digits

@paceline.recipe(epochs=2)
def build(*, seen: int = 0) -> paceline.Job:
    """Nothing to validate on."""
    train, test = load_digits()
    none = dataclasses.replace(test, images=test.images[:seen], labels=test.labels[:seen])
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    return paceline.Job(model=model, train=train, validation=none)
'''


@pytest.mark.slow
def test_a_run_without_validation_samples(
    paceline: Paceline,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "blind.py").write_text(_WITHOUT_VALIDATION)
    run = tmp_path / "run"
    done = paceline.run(*"train blind.py:build --on here --run-dir".split(), run)
    assert done.code == 0, done.err
    assert "validation  none: there is no validation set, or it is empty" in done.out
    assert "nan%" not in done.out
    assert main(["evaluate", str(run)]) == ExitCode.DONE
    shown = capsys.readouterr()
    assert "the last one is taken" in shown.err
    assert "samples   none: the validation set is empty" in shown.out
    assert main(["export", str(run), str(tmp_path / "weights.pt")]) == ExitCode.DONE
    assert "the last one is taken" in capsys.readouterr().err
    assert main(["report", str(run)]) == ExitCode.DONE


def test_report_again(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "report.html").unlink()
    assert main(["report", str(run)]) == ExitCode.DONE
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert "digits" in (run / "report.html").read_text()


def test_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == ExitCode.DONE
    shown = capsys.readouterr().out.splitlines()
    listed = shown[: shown.index("")]
    assert [line.split()[0] for line in listed] == list(BUILT_IN)
    assert all(len(line.split()) > 4 for line in listed)


def test_recipes_fit_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["recipes"]) == ExitCode.DONE
    shown = capsys.readouterr().out.splitlines()
    assert max(map(len, shown)) <= 60
    assert any(line.startswith(" " * 20) for line in shown)  # below its summary
