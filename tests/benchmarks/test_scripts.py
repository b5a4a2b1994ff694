"""Scripts run at a tiny size; what they measure then means nothing and isn't looked at."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import input as input_benchmark
from benchmarks import ordered, restarts, several_nodes, soak, startup
from benchmarks.commands import ROOT
from benchmarks.emulated import resnet50
from benchmarks.figures import Report
from benchmarks.fleet import fleet
from benchmarks.random_data import cifar_shaped, write_mnist_shaped
from benchmarks.trials import Trial, run, serve
from tests.support.needs import NAMESPACES, need

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def test_input() -> None:
    torch.manual_seed(0)  # what torchvision's transforms draw from: means of 256 images differ
    data = cifar_shaped(2 * input_benchmark.BATCH)
    ours = input_benchmark.our_batches(data, torch.channels_last)
    theirs = input_benchmark.their_batches(data)
    blocks = input_benchmark.play(ours, theirs, pairs=6, batches=1)
    ours_next, theirs_next = next(ours), next(theirs)
    assert ours_next.shape == theirs_next.shape == (256, 3, 32, 32)
    torch.testing.assert_close(ours_next.mean(), theirs_next.mean(), rtol=0, atol=0.03)
    torch.testing.assert_close(ours_next.std(), theirs_next.std(), rtol=0, atol=0.03)
    report = Report(name="input")
    input_benchmark.add_match(report, "contiguous", blocks, 8.0)
    assert report.figures[0].at_least == 8.0


def test_ordered_on_loopback() -> None:
    setting = ordered.Setting(workers=2, link=None, seconds=0.1)
    time, sent = ordered.figures(setting, *ordered.measure(setting))
    assert time.count == sent.count == 6


@pytest.mark.hosts
def test_several_nodes() -> None:
    need(NAMESPACES)
    setting = several_nodes.Setting(
        nodes=2, per_node=2, link=1000, network="6 MB", pairs=2, compute_s=0.0
    )
    ours, theirs, same = several_nodes.measure(setting)
    assert same
    gradients = resnet50().bytes  # a node's sums cross its link once: half of them each way, twice
    assert all(0.99 * gradients < sent < 1.1 * gradients for sent in ours.sent)
    assert all(1.4 * gradients < sent < 2.0 * gradients for sent in theirs.sent)


def test_a_trial_on_loopback() -> None:
    with fleet(2, serve) as workers:
        trial = Trial(network="vgg19", compute_s=0.01, workers=2, lead=2, steps=2)
        assert run(trial, workers, "first").step_s > trial.compute_s


def test_startup(tmp_path: Path) -> None:
    write_mnist_shaped(tmp_path, 128, 16)
    for side in startup._SIDES:
        assert startup.run_side(side, tmp_path, 0) > 0


def test_restarts(tmp_path: Path) -> None:
    wanted = restarts.undisturbed(tmp_path / "undisturbed", epochs=3)
    found = restarts.disturbed(tmp_path / "disturbed", epochs=3, kills=1, seed=1)
    assert found.restarts == len(found.kills) == 1
    assert found.weights_sha256 == wanted


def test_soak(tmp_path: Path) -> None:
    """In a process of its own: it ends all that is left below it."""
    words = [sys.executable, "-m", "benchmarks.soak", "--minutes", "0"]
    words += ["--only", "supervisor killed (SIGKILL)"]
    variables = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(words, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 runs ended as documented; 0 faults missed" in done.stdout


def test_a_soaks_moments_follow_from_its_seed(tmp_path: Path) -> None:
    draws = [soak.Training(tmp_path / str(i), 7).draw for i in range(2)]
    assert draws[0].getstate() == draws[1].getstate() == random.Random(7).getstate()
