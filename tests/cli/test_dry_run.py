"""`--dry-run` where no cluster is asked for: what would start, and nothing is."""

import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.cli.app import main
from paceline.cli.dry_run import training_bytes
from paceline.errors import ExitCode
from paceline.optim.build import build_optimizer
from paceline.optim.table import OPTIMIZERS
from paceline.training.config import TrainConfig

_GOLDEN = Path(__file__).parents[1] / "results" / "golden" / "run"
Plan = Callable[..., str]


@pytest.fixture
def plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Plan:
    """Gives what `--dry-run` says, in an empty directory that stays as it is."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> str:
        before = sorted(tmp_path.rglob("*"))
        assert main([*words, "--dry-run"]) == ExitCode.DONE, capsys.readouterr().err
        assert sorted(tmp_path.rglob("*")) == before
        return capsys.readouterr().out

    return run


def test_what_would_start(plan: Plan, tmp_path: Path) -> None:
    told = plan(*"train digits --workers 2 --global-batch 60 --epochs 3 --run-dir mine".split())
    assert "--epochs           3       (command line)" in told
    assert "--momentum         0.9     (recipe)" in told
    assert "  recipe   digits\n" in told
    steps = math.ceil(1442 / 60)
    assert f"1,442 images, {steps} steps an epoch" in told
    assert f"3 epochs: {3 * steps} steps" in told
    assert "workers  2 on this machine, 1 thread each" in told
    assert f"run      {tmp_path / 'mine'}, which would be made" in told
    assert told.endswith("Nothing has been started.\n")


def test_where_data_is_missing_nothing_is_fetched(plan: Plan) -> None:
    told = plan("train", "mnist")
    assert "as a dry run fetches nothing; steps and memory aren't known: " in told
    assert "train-images-idx3-ubyte is missing" in told
    assert "workers  " in told


def test_what_is_wrong_with_a_recipe_isnt_laid_to_the_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # a recipe's own directory comes before it
    (tmp_path / "fetching.py").write_text("def build(*, download: bool = True):\n    pass\n")
    assert main(["train", "fetching.py:build", "--dry-run"]) == ExitCode.JOB
    said = capsys.readouterr().err
    assert "must return a paceline.Job" in said
    assert "fetches nothing" not in said


@pytest.mark.parametrize(
    ("words", "told", "code"),
    [
        (
            ["mnist", "--no-download"],
            "train-images-idx3-ubyte is missing",
            ExitCode.JOB,
        ),
        (
            ["imagefolder-vgg19", "--data-dir", "nowhere"],
            "expected are train/CLASS/IMAGE",
            ExitCode.JOB,
        ),
        (["synthetic", "--model", "none_such"], "none_such", ExitCode.USAGE),
    ],
)
def test_what_the_training_would_lack(
    words: list[str],
    told: str,
    code: ExitCode,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *words, "--dry-run"]) == code
    assert told in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_batch_larger_than_the_training_set(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    where = ["--run-dir", str(tmp_path / "run"), "--dry-run"]
    assert main(["train", "digits", "--global-batch", "1443", *where]) == ExitCode.DONE
    said = "The global batch (1,443) is larger than the training set (1,442 samples): an epoch is"
    assert said in capsys.readouterr().err
    assert main(["train", "digits", "--global-batch", "1442", *where]) == ExitCode.DONE
    assert "larger" not in capsys.readouterr().err


def test_of_a_script_and_of_a_run(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "mine.py").touch()
    assert "the script makes it" in plan("run", "mine.py")
    shutil.copytree(_GOLDEN, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    told = plan("resume", "run")
    assert "--lr               0.05    (run)" in told
    assert f"{tmp_path / 'run'}, from step " in told


def test_what_could_not_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.json").write_text("{}")
    where = ["--run-dir", str(tmp_path)]
    assert main(["train", "digits", "--dry-run", *where]) == ExitCode.USAGE
    assert "already holds a training" in capsys.readouterr().err
    assert main(["train", "digits", "--dry-run", "--json"]) == ExitCode.USAGE
    assert "--json has no effect with --dry-run" in capsys.readouterr().err


def _model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 10))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.core_cases(3)
def test_memory_is_what_a_real_step_takes(optimizer: str) -> None:
    with_momentum = "momentum" in OPTIMIZERS[optimizer].defaults  # type: ignore[index]
    settings = {"optimizer": optimizer} | ({"momentum": 0.9} if with_momentum else {})
    config = TrainConfig.from_settings(settings)
    model = _model()
    model[1].weight.requires_grad = False  # type: ignore[index]
    made = build_optimizer(config.optim, model.named_parameters(), 0.1)
    model(torch.randn(2, 1, 8, 8)).sum().backward()
    made.step()
    held = [v for each in made.state.values() for v in each.values() if isinstance(v, torch.Tensor)]
    gradients = [p.grad.nbytes for p in model.parameters() if p.grad is not None]
    weights = sum(tensor.nbytes for tensor in model.state_dict().values())
    expected = (weights, sum(gradients), sum(tensor.nbytes for tensor in held))
    assert training_bytes(model, config) == expected
