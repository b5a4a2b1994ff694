"""Every script runs at a tiny size; what it measures then means nothing and isn't looked at."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import input as input_benchmark
from benchmarks import memory, ordered, overhead, restarts, several_nodes, snapshots, startup
from benchmarks.emulated import resnet50
from benchmarks.figures import Report
from benchmarks.mnist_shaped import write_mnist_shaped
from benchmarks.ordered_hosts import hosts
from benchmarks.overhead import Match
from benchmarks.stamps import read_stamps
from paceline.launch.local import forkserver
from tests.support.needs import NAMESPACES, need

pytestmark = pytest.mark.ranks


@pytest.fixture
def own_fork_server() -> Iterator[None]:
    yield
    forkserver.release()


@pytest.mark.parametrize("opponent", ["tuned", "article"])
@pytest.mark.slow
def test_overhead(opponent: str, own_fork_server: None) -> None:
    found = next(m for m in overhead.matches(quick=True) if m.opponent == opponent)
    tiny = {"pairs": 8, "block_steps": 1, "epoch_steps": 4}
    match = Match(**{**vars(found), **tiny})
    blocks = overhead.play(match)
    assert len(blocks.ours) == len(blocks.theirs) == 8
    assert blocks.closing == [False, False, False, True] * 2
    assert (blocks.difference is not None) == (opponent == "tuned")
    report = Report(name="overhead")
    overhead.add_match(report, match, blocks)
    assert report.figures[0].what == match.title


@pytest.mark.slow
def test_snapshots(own_fork_server: None) -> None:
    measured = snapshots.run_plan(snapshots.Plan(pairs=2, block_steps=10))
    assert len(measured.with_snapshots) == len(measured.without) == 2
    assert len(measured.stall) == len(measured.offer) == len(measured.publish_cpu) == 2


@pytest.mark.slow
def test_input() -> None:
    torch.manual_seed(0)  # what torchvision's transforms draw from: means of 256 images differ
    data = input_benchmark.random_images(2 * input_benchmark.BATCH)
    ours = input_benchmark.our_batches(data, "nearest", torch.channels_last)
    theirs = input_benchmark.their_batches(data, "nearest")
    blocks = input_benchmark.play(ours, theirs, pairs=6, batches=1)
    assert len(blocks.ours) == len(blocks.theirs_cpu) == 6
    ours_next, theirs_next = next(ours), next(theirs)
    assert ours_next.shape == theirs_next.shape == (256, 3, 32, 32)
    for batch in (ours_next, theirs_next):
        assert (float(batch.min()), float(batch.max())) == (-1.0, 1.0)
    torch.testing.assert_close(ours_next.mean(), theirs_next.mean(), rtol=0, atol=0.03)
    torch.testing.assert_close(ours_next.std(), theirs_next.std(), rtol=0, atol=0.03)
    report = Report(name="input")
    input_benchmark.add_match(report, "nearest", blocks, 8.0)
    assert report.figures[0].at_least == 8.0


@pytest.mark.slow
def test_ordered_on_loopback() -> None:
    setting = ordered.Setting(workers=2, link=None, seconds=0.1)
    time, sent = ordered.figures(setting, *ordered.measure(setting))
    assert time.count == sent.count == 6
    assert (time.at_most, sent.at_most) == (1.0, 1.02)


@pytest.mark.hosts
@pytest.mark.slow
def test_ordered_between_hosts() -> None:
    need(NAMESPACES)
    setting = ordered.Setting(workers=2, link=2000, seconds=0.1, compute_s=0.01, congestion="reno")
    ours, theirs = ordered.measure(setting)
    gradients = resnet50().bytes  # what a ring of two sends of them
    for side in (ours, theirs):
        assert len(side.step_s) == 6
        assert all(gradients < sent < 1.1 * gradients for sent in side.sent)


@pytest.mark.hosts
@pytest.mark.slow
def test_hosts_have_the_congestion_control_that_is_named() -> None:
    need(NAMESPACES)
    with hosts(1, 100, congestion="reno") as (name,):
        asked = f"ip -n {name} route show"
        said = subprocess.run(asked.split(), capture_output=True, text=True).stdout
        assert "congctl reno" in said


@pytest.mark.hosts
@pytest.mark.slow
def test_several_nodes() -> None:
    need(NAMESPACES)
    setting = several_nodes.Setting(
        nodes=2, per_node=2, link=1000, network="6 MB", pairs=2, compute_s=0.0
    )
    ours, theirs, same = several_nodes.measure(setting)
    assert same
    (figure,) = several_nodes.figures(setting, ours, theirs, same=same)
    assert figure.count == 2
    gradients = resnet50().bytes  # a node's sums cross its link once: half of them each way, twice
    assert all(0.99 * gradients < sent < 1.1 * gradients for sent in ours.sent)
    assert all(1.4 * gradients < sent < 2.0 * gradients for sent in theirs.sent)


@pytest.mark.slow
def test_startup(tmp_path: Path) -> None:
    write_mnist_shaped(tmp_path, 128, 16)
    for side in startup._SIDES:
        assert startup.run_side(side, tmp_path, 0) > 0


@pytest.mark.slow
def test_memory(tmp_path: Path) -> None:
    write_mnist_shaped(tmp_path, 256, 16)
    for number, side in enumerate(memory._SIDES[1:]):  # the script by hand runs in test_startup
        stamps = tmp_path / str(number)
        workers = memory.run_side(side, tmp_path, stamps, 256)
        assert len(workers) == 2
        assert all(worker.rss > 0 for worker in workers)
        assert {stamp.steps for stamp in read_stamps(stamps)} == {2}


@pytest.mark.slow
def test_restarts(tmp_path: Path) -> None:
    wanted = restarts.undisturbed(tmp_path / "undisturbed", epochs=3)
    found = restarts.disturbed(tmp_path / "disturbed", epochs=3, kills=1, seed=1)
    assert found.restarts == len(found.kills) == 1
    assert found.weights_sha256 == wanted
