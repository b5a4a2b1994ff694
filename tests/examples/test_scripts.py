"""The example scripts run; those of one process become Paceline's by six lines."""

import csv
import re
import runpy
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.docs.pages import ROOT
from tests.script.scripts import summary
from tests.support.idx_files import write_mnist
from tests.support.warm import run_warm

EXAMPLES = ROOT / "examples"
MOST_LINES = 6
PAIRS = {
    "mnist_cnn": ("MNIST", ["--epochs", "2"]),
    "fashion_wideresnet": (
        "FashionMNIST",
        ["--epochs", "3", "--width", "1", "--base-lr", "0.003", "--target-accuracy", "1"],
    ),
}
ON_TWO = ("-m", "paceline", "run", "--workers", "2", "--loader-workers", "0", "--run-dir", "run")


def lines_of(path: Path) -> list[str]:
    """Code without docstrings, blank lines and indentation."""
    text = re.sub(r'"""(?:.|\n)*?"""', "", path.read_text())
    return [line.strip() for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("name", PAIRS)
def test_six_lines_make_a_script_parallel(name: str) -> None:
    before = lines_of(EXAMPLES / f"{name}_before.py")
    after = lines_of(EXAMPLES / f"{name}_after.py")
    new = [line for line in after if line not in before]
    assert len(new) <= MOST_LINES, new
    assert [line for line in after if line in before] == [line for line in before if line in after]
    gone = " ".join(line for line in before if line not in after)
    assert "def evaluate" in gone  # nothing else is left out but what these lines do
    assert len(after) < len(before)


def run(words: list[str], directory: Path) -> str:
    done = run_warm([sys.executable, *words], directory, PACELINE_DEVICE="cpu")
    assert done.returncode == 0, done.stderr
    return done.stdout


def accuracies(printed: str) -> list[float]:
    return [float(found) for found in re.findall(r"epoch \d+: accuracy ([\d.]+)%", printed)]


@pytest.mark.ranks
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.slow
def test_both_learn_the_same(name: str, tmp_path: Path) -> None:
    folder, options = PAIRS[name]
    write_mnist(tmp_path / "data", train=800, test=100, gz=False, name=folder)
    before = str(EXAMPLES / f"{name}_before.py")
    after = str(EXAMPLES / f"{name}_after.py")
    by_hand = accuracies(run([before, *options], tmp_path))
    # The smaller one of them on one worker as well.
    alone = accuracies(run([after, *options], tmp_path)) if name == "mnist_cnn" else by_hand
    on_two = accuracies(run([*ON_TWO, after, "--", *options], tmp_path))
    assert len(by_hand) == len(alone) == len(on_two) == int(options[1])
    # BatchNorm's running statistics lag behind in a training as short as this: the best counts.
    assert min(map(max, (by_hand, alone, on_two))) > 25  # of ten classes
    found = summary(tmp_path / "run")
    assert found["val_samples"] == 100
    assert found["val_accuracy"] == pytest.approx(on_two[-1] / 100)


def figures(name: str, directory: Path) -> list[dict[str, float]]:
    """Run an example on two workers; its own figures by epoch."""
    run([*ON_TWO, str(EXAMPLES / f"{name}.py")], directory)
    with (directory / "run" / "metrics.csv").open() as file:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]


@pytest.mark.slow
@pytest.mark.ranks
def test_the_stream_is_learnt_as_in_a_plain_loop(tmp_path: Path) -> None:
    """Least squares forget where they began, so that another start comes to the same line."""
    example = runpy.run_path(str(EXAMPLES / "iterable.py"))
    model, wanted = nn.Linear(1, 1), []
    nn.init.zeros_(model.weight)
    optimizer, lines = torch.optim.SGD(model.parameters(), lr=0.1), example["Lines"]()
    for epoch in range(2):
        lines.set_epoch(epoch)
        for samples in batched(lines, 64):
            x, y = (torch.stack([sample[key] for sample in samples]) for key in "xy")
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
        wanted.append((model.weight.item(), model.bias.item()))
    found = [(row["slope"], row["offset"]) for row in figures("iterable", tmp_path)]
    assert found[1] == pytest.approx(wanted[1], abs=1e-3)
    assert found[0] == pytest.approx(wanted[0], abs=0.05)


@pytest.mark.slow
@pytest.mark.ranks
def test_the_gan_draws_nearer_to_the_ring_than_an_untrained_one(tmp_path: Path) -> None:
    make_net = runpy.run_path(str(EXAMPLES / "gan.py"))["make_net"]
    torch.manual_seed(0)
    with torch.no_grad():
        points = [make_net(2)(torch.randn(512, 2)) for _ in range(3)]
    untrained = [float((drawn.norm(dim=1) - 1).abs().mean()) for drawn in points]
    found = [row["distance"] for row in figures("gan", tmp_path)]
    assert len(found) == 10
    # It circles around the ring: one epoch says little.
    assert sum(found) / len(found) < 0.8 * min(untrained)


def batched(samples: Iterable[dict[str, Tensor]], size: int) -> Iterator[list[dict[str, Tensor]]]:
    held: list[dict[str, Tensor]] = []
    for sample in samples:
        held.append(sample)
        if len(held) == size:
            yield held
            held = []
    if held:
        yield held
