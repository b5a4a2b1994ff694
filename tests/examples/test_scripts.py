"""The example scripts run; those of one process become Paceline's by six lines."""

import csv
import re
import sys
from pathlib import Path

import pytest

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
        ["--epochs", "3", "--width", "1", "--base-lr", "0.1", "--target-accuracy", "1"],
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
def test_both_learn_the_same(name: str, tmp_path: Path) -> None:
    folder, options = PAIRS[name]
    write_mnist(tmp_path / "data" / folder / "raw", train=800, test=100, gz=False)
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


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "column", "aim"), [("gan", "distance", 0), ("iterable", "slope", 3)]
)
@pytest.mark.slow
def test_the_others_learn_on_two_workers(
    name: str, column: str, aim: float, tmp_path: Path
) -> None:
    run([*ON_TWO, str(EXAMPLES / f"{name}.py")], tmp_path)
    with (tmp_path / "run" / "metrics.csv").open() as file:
        *_, last = csv.DictReader(file)
    assert float(last[column]) == pytest.approx(aim, abs=0.6)
