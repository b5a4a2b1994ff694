"""The trainings by which methods are compared, and their data."""

import argparse
from pathlib import Path

import pytest
import torch

from benchmarks import quality
from benchmarks.distorted import SIDE, DistortedNet, distorted
from benchmarks.quality import METHODS, Result, Run
from paceline.data.digits import load_digits
from paceline.training.config import TrainConfig


def result(accuracy: float) -> Result:
    return Result(accuracy=accuracy, loss=1.0, steps=3, samples=192, seconds=1.0)


def run(method: str, seed: int) -> Run:
    return Run(task="digits", method=method, seed=seed, workers=8, settings={})


def test_every_training_has_the_same_samples() -> None:
    runs = quality.wanted(list(quality.TASKS), 2, "", None)
    assert len(runs) == len({one.key() for one in runs}) == 2 * 2 * len(METHODS)
    for task in quality.TASKS:
        configs = [TrainConfig.from_settings(one.settings) for one in runs if one.task == task]
        assert len({(c.loop.epochs, c.data.global_batch) for c in configs}) == 1
        assert all(c.loop.target_accuracy is None for c in configs)


def test_methods_are_compared_seed_by_seed() -> None:
    results = [
        (run("all-reduce", 0), result(0.90)),
        (run("PowerSGD", 0), result(0.91)),
        (run("all-reduce", 1), result(0.95)),
        (run("PowerSGD", 1), result(0.93)),
    ]
    (figure,) = quality.judge(results)
    assert figure.value == pytest.approx(-0.5)
    assert (figure.low, figure.high) == pytest.approx((-2.0, 1.0))
    assert figure.met is False
    assert "92.00 %" in quality.table(results)


@pytest.mark.ranks
@pytest.mark.slow
def test_what_is_trained_isnt_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality, "WORKERS", 2)
    lines = tmp_path / "lines.jsonl"
    runs = quality.wanted(["digits"], 1, "nothing else", 1)
    (first,) = quality.train_all(runs, lines)
    assert first[0].method == quality.PLAIN
    assert first[1].samples == 1442
    assert 0.1 < first[1].accuracy <= 1.0
    assert list(quality.train_all(runs, lines)) == [first]  # to the last digit of the seconds
    assert len(lines.read_text().splitlines()) == 1


def test_the_quick_plan_is_one_seed_of_the_small_task() -> None:
    runs = quality.planned(argparse.Namespace(quick=True, only=""))
    assert [(one.task, one.seed) for one in runs] == [("digits", 0)] * len(METHODS)


def test_distorted_digits_are_the_same_each_time() -> None:
    _, digits = load_digits()
    first, again, other = (distorted(digits, 2, seed) for seed in (1, 1, 2))
    assert first.images.shape == (2 * digits.num_samples, 1, SIDE, SIDE)
    assert torch.equal(first.images, again.images)
    assert not torch.equal(first.images, other.images)
    assert torch.equal(first.labels, digits.labels.repeat(2))
    copies = first.images.chunk(2)
    assert not torch.equal(copies[0], copies[1])
    scaled = first.images.float() / 255
    torch.testing.assert_close(scaled.mean(), torch.tensor(first.mean[0]), rtol=0, atol=0.05)
    torch.testing.assert_close(scaled.std(), torch.tensor(first.std[0]), rtol=0, atol=0.05)


def test_the_network_takes_them() -> None:
    assert DistortedNet()(torch.zeros(2, 1, SIDE, SIDE)).shape == (2, 10)
