"""With shards, what a script computes before its session is the same however it is started."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.script.scripts import summary

pytestmark = pytest.mark.ranks

NET = """
import hashlib
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1)
net = nn.Sequential(nn.Linear(5, 700), nn.ReLU(), nn.Linear(700, 700), nn.ReLU(), nn.Linear(700, 2))
for part in (net[0], net[2], net[4]):
    nn.init.orthogonal_(part.weight)
print("first weights", hashlib.sha256(net[2].weight.detach().numpy().tobytes()).hexdigest())
"""
"""A QR decomposition of a large matrix has other bits with two threads than with one."""
TRAINING = """
import paceline

points = torch.randn(32, 5, generator=torch.Generator().manual_seed(2))
data = torch.utils.data.TensorDataset(points, (points.sum(1) > 0).long())
s = paceline.session(SESSION)
model = s.model(net)
s.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
batches = s.loader(data, global_batch=16)
for _ in s.epochs(1):
    for inputs, targets in batches:
        s.step(F.cross_entropy(model(inputs), targets))
"""


def write(directory: Path, session: str = "") -> Path:
    path = directory / "early.py"
    settings = ", ".join(filter(None, [session, "device='cpu', loader_workers=0"]))
    path.write_text(NET + TRAINING.replace("SESSION", settings))
    return path


def run(script: Path, *words: str, threads: int = 2) -> "subprocess.CompletedProcess[str]":
    """Start something from scratch, with more threads than shards allow unless they are given."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=script.parent,
        env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def first_weights(text: str) -> list[str]:
    return [line.split()[-1] for line in text.splitlines() if line.startswith("first weights")]


def single_threaded(directory: Path) -> str:
    """What plain PyTorch computes with one thread."""
    path = directory / "plain.py"
    path.write_text(NET)
    done = run(path, str(path), threads=1)
    assert done.returncode == 0, done.stderr
    return first_weights(done.stdout)[0]


@pytest.mark.slow
def test_run_pins_before_the_first_line_on_any_number_of_workers(tmp_path: Path) -> None:
    script, expected = write(tmp_path), single_threaded(tmp_path)
    hashes = []
    for workers in ("1", "2"):
        words = ["-m", "paceline", "run", str(script), "--shards", "2", "--workers", workers]
        done = run(script, *words, "--run-dir", f"on-{workers}")
        assert done.returncode == 0, done.stderr
        assert first_weights(done.stdout) == [expected]
        hashes.append(summary(tmp_path / f"on-{workers}")["weights_sha256"])
    assert hashes[0] == hashes[1]


@pytest.mark.slow
def test_a_plain_process_starts_anew_with_the_threads_that_shards_need(tmp_path: Path) -> None:
    script, expected = write(tmp_path, "'r', shards=2"), single_threaded(tmp_path)
    done = run(script, str(script))
    assert done.returncode == 0, done.stderr
    assert "starting early.py anew with 1 CPU thread" in done.stderr
    assert first_weights(done.stdout)[-1] == expected
    assert summary(tmp_path / "r")["steps"] == 2


@pytest.mark.slow
def test_shards_that_only_the_script_asks_for_are_told_to_the_launcher(tmp_path: Path) -> None:
    script = write(tmp_path, "shards=2")
    done = run(script, "-m", "paceline", "run", str(script), "--workers", "1")
    assert done.returncode == 2, done.stderr
    assert "paceline run early.py --shards 2" in done.stderr
    assert "has run with 2 CPU threads until here instead of 1" in done.stderr


@pytest.mark.slow
def test_a_process_that_cannot_be_started_anew_says_how_to_start_it(tmp_path: Path) -> None:
    write(tmp_path, "shards=2")
    script = tmp_path / "main.py"
    script.write_text("import early\n")
    done = run(script, str(script))
    assert done.returncode == 1
    assert "start it with OMP_NUM_THREADS=1" in done.stderr
    assert "by a module that is imported" in done.stderr


@pytest.mark.parametrize("seeded", [True, False])
@pytest.mark.slow
def test_a_model_that_was_built_without_a_seed_cannot_be_repeated(
    seeded: bool, tmp_path: Path
) -> None:
    script = write(tmp_path, "'r'")
    if not seeded:
        script.write_text(script.read_text().replace("torch.manual_seed(1)", ""))
    done = run(script, str(script))
    assert done.returncode == 0, done.stderr
    warned = "model were drawn without a seed, before the session: this run can't be repeated"
    assert (warned in done.stdout + done.stderr) != seeded
    derived = json.loads((tmp_path / "r" / "run.json").read_text())["derived"]
    assert derived["unseeded_models"] == ([] if seeded else ["model"])
