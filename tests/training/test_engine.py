"""Epochs of a script: recorded, judged, ended."""

import csv
import multiprocessing
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import default_loader
from torchvision.transforms import v2

from paceline.data.order import epoch_order
from paceline.distributed.group import Group
from paceline.errors import InterruptedTraining, UsageError
from paceline.options.fields import OptionValue
from paceline.training.rng import seed_everything
from paceline.training.snapshots import manager
from paceline.training.status_exchange import StopFlag
from tests.launch.waiting import until
from tests.support.collectives import collectives_so_far
from tests.support.image_files import write_image_folder
from tests.support.ranks import RankError, run_ranks
from tests.support.sessions import (
    BATCH,
    first_of,
    net,
    pair_of,
    points,
    session_on,
    sgd,
    weights_of,
)

pytestmark = pytest.mark.ranks
WORLDS = [1, 2, 3]


def row_of(directory: Path) -> list[dict[str, str]]:
    with (directory / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def judged(accuracies: list[float]) -> Callable[[Group, Path, Mapping[str, OptionValue]], int]:
    """Make a script whose validation gives these figures, epoch by epoch."""

    def body(group: Group, directory: Path, settings: Mapping[str, OptionValue]) -> int:
        with session_on(group, directory, settings) as s:
            model = s.model(net())
            s.optimizer(sgd(model))
            batches = s.loader(TensorDataset(*points()), global_batch=BATCH)
            test = s.eval_loader(TensorDataset(*points(11, seed=2)))
            ran = 0
            for epoch in s.epochs(len(accuracies)):
                for batch in batches:
                    s.step(F.cross_entropy(model(pair_of(batch)[0]), pair_of(batch)[1]))
                ran += 1
                value = accuracies[epoch]
                s.evaluate(lambda _, value=value: {"accuracy": value}, test)  # type: ignore[misc]
            return ran

    return body


@pytest.mark.slow
def test_stops_by_target_patience_and_early_stopping(tmp_path: Path) -> None:
    rising = judged([0.5, 0.9, 0.95, 0.97])
    asked = {"target_accuracy": 0.9, "patience": 2}
    assert run_ranks(2, rising, tmp_path / "target", asked) == [3, 3]
    falling = judged([0.5, 0.4, 0.3, 0.2])
    assert run_ranks(2, falling, tmp_path / "early", {"early_stopping": 2}) == [3, 3]
    assert [row["val_accuracy"] for row in row_of(tmp_path / "early")] == ["0.5", "0.4", "0.3"]


def test_a_time_budget_ends_an_endless_script(tmp_path: Path) -> None:
    found = run_ranks(2, judged([0.5] * 100_000), tmp_path, {"time_budget": "1s"})
    assert found[0] == found[1] < 100_000


@dataclass(frozen=True, kw_only=True)
class ReadTraining:
    """What a rank trained on, and what it read for that."""

    batches: list[Tensor]
    weights: list[Tensor]
    """After each epoch."""
    read: list[int]
    """Samples read until the last batch of each epoch has come, and until its evaluation begins."""
    left: int
    """Loader processes that outlive the training."""


def train_on_images(
    group: Group,
    directory: Path,
    images: Path,
    loader_workers: int,
    reached: int | None = None,
    stop: int | None = None,
) -> ReadTraining:
    """Train 4 epochs of 3 steps on an image folder, on 2 ranks, as any script does.

    Args:
        group: The ranks.
        directory: The run directory.
        images: The folder, of 24 images: 12 a rank.
        loader_workers: Processes that read. With any the next epoch, if there is one, has to have
            been read before this one is evaluated: 4 batches are kept ready, more than an epoch's.
        reached: Epoch whose evaluation reaches the target accuracy.
        stop: Step after which a signal comes.
    """
    log = directory / f"read-{group.rank}-{time.monotonic_ns()}"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.touch()

    def logged(path: str) -> Image.Image:
        with log.open("a") as file:
            file.write(f"{path}\n")
        return default_loader(path)  # type: ignore[no-any-return]  # torchvision has no types

    def count() -> int:
        return len(log.read_text().splitlines())

    before = set(multiprocessing.active_children())
    flag = StopFlag(under_launcher=True)
    seen: list[Tensor] = []
    weights: list[Tensor] = []
    read: list[int] = []
    settings: dict[str, OptionValue] = {"loader_workers": loader_workers, "target_accuracy": 0.9}
    with session_on(group, directory, settings, flag) as s, suppress(InterruptedTraining):
        model = s.model(nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 3)))
        s.optimizer(sgd(model))
        changes = [v2.RandomResizedCrop(8), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
        data = ImageFolder(images / "train", v2.Compose(changes), loader=logged)
        batches = s.loader(data, global_batch=BATCH)
        test = s.eval_loader(TensorDataset(*points(11, seed=2)))
        for epoch in s.epochs(4):
            for batch in batches:
                inputs, targets = pair_of(batch)
                s.step(F.cross_entropy(model(inputs), targets))
                seen.append(inputs.clone())
                last = count()
                if len(seen) == stop:
                    flag.name = "SIGTERM"
            wanted = last + 12 * (loader_workers > 0 and epoch < 3)
            until(lambda wanted=wanted: count() >= wanted)  # type: ignore[misc]
            read += [last, count()]
            weights += weights_of(model)
            value = float(epoch == reached)
            s.evaluate(lambda _, value=value: {"accuracy": value}, test)  # type: ignore[misc]
    left = len(set(multiprocessing.active_children()) - before)
    return ReadTraining(batches=seen, weights=weights, read=read, left=left)


@pytest.mark.slow
def test_the_next_epoch_of_an_image_folder_is_read_before_it_is_asked_for(tmp_path: Path) -> None:
    images = write_image_folder(tmp_path / "images")

    def train(
        name: str, loader_workers: int, reached: int | None = None, stop: int | None = None
    ) -> list[ReadTraining]:
        path = tmp_path / name
        return run_ranks(2, train_on_images, path, images, loader_workers, reached, stop)

    plain, ahead = train("plain", 0), train("ahead", 2)
    stopped, resumed = train("legs", 2, stop=4), train("legs", 2, reached=2)
    for rank in range(2):
        # Every sample is read once, each epoch but the first during the one before.
        assert plain[rank].read == [12, 12, 24, 24, 36, 36, 48, 48]
        assert ahead[rank].read == [12, 24, 24, 36, 36, 48, 48, 48]
        # A resumed training reads on from where it was left; its last epoch is never asked for.
        assert stopped[rank].read == [12, 24]
        assert resumed[rank].read == [8, 20, 20, 32]
        assert [training[rank].left for training in (ahead, stopped, resumed)] == [0, 0, 0]
        batches, weights = plain[rank].batches, plain[rank].weights
        assert_same(ahead[rank].batches + ahead[rank].weights, batches + weights)
        assert_same(stopped[rank].batches + resumed[rank].batches, batches[:9])
        assert_same(stopped[rank].weights + resumed[rank].weights, weights[:6])


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_leaving_the_loop_early_ends_the_epoch(tmp_path: Path) -> None:
    def body(group: Group) -> tuple[int, int, list[int]]:
        with session_on(group, tmp_path, {"max_batch_per_worker": 3}) as s:
            model = s.model(net())
            s.optimizer(sgd(model))
            batches = s.loader(TensorDataset(*points()), global_batch=16)
            lengths = []
            for epoch in s.epochs(4):
                pieces = 0
                assert all(p.grad is None for p in model.parameters())
                for batch in batches:
                    pieces += 1
                    s.step(F.cross_entropy(model(pair_of(batch)[0]), pair_of(batch)[1]))
                    if epoch == 0 and pieces == 4:
                        break  # in the middle of the second batch of three pieces
                lengths.append(pieces)
                if epoch == 2:
                    break
            state = s.engine.context.progress.state
        return state.samples_seen, state.epoch, lengths

    for samples, epochs, lengths in run_ranks(2, body):
        assert samples == 32 + 50 + 50
        assert epochs == 3
        assert lengths == [4, 10, 10]
    assert [row["epoch"] for row in row_of(tmp_path)] == ["1", "2", "3"]


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.core_cases(2)
def test_figures_of_the_scripts_own(world_size: int, tmp_path: Path) -> None:
    def body(group: Group) -> tuple[float, int, list[float]]:
        with session_on(group, tmp_path) as s:
            s.optimizer(sgd(s.model(net())))
            batches = s.loader(TensorDataset(*points()), global_batch=BATCH)
            for epoch in s.epochs(2):
                list(batches)
                s.log(epsilon=epoch / 4, norm=torch.tensor(2.5))
                if epoch == 1:
                    s.log(late=7)
            s.barrier()
            return float(s.sum(0.1)), int(s.sum(2**40)), s.sum(torch.ones(2)).tolist()

    n = world_size
    assert run_ranks(n, body) == [(sum([0.1] * n), n * 2**40, [float(n)] * 2)] * n
    found = [(row["epsilon"], row["norm"], row["late"]) for row in row_of(tmp_path)]
    assert found == [("0", "2.5", ""), ("0.25", "2.5", "7")]


def test_evaluation_after_the_loop_is_not_the_last_epochs(tmp_path: Path) -> None:
    def body(group: Group) -> tuple[float | None, Mapping[str, float]]:
        with session_on(group, tmp_path) as s:
            s.optimizer(sgd(s.model(net())))
            batches = s.loader(TensorDataset(*points()), global_batch=BATCH)
            test = s.eval_loader(TensorDataset(*points(3)))
            for _ in s.epochs(1):
                list(batches)
                s.evaluate(lambda _: {"accuracy": 0.25}, test)
            return s.engine.context.progress.state.val_accuracy, s.evaluate(
                lambda _: {"accuracy": 1.0}, test
            )

    assert run_ranks(2, body) == [(0.25, {"accuracy": 1.0})] * 2


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.core_cases(1)
def test_what_the_script_keeps_goes_on_inside_an_epoch(world_size: int, tmp_path: Path) -> None:
    """A scheduler stepped by the batch, a second loader, two optimizers, a sum: no bit changes."""

    def body(group: Group, directory: Path, stop: int | None) -> tuple[list[float], list[Tensor]]:
        flag = StopFlag(under_launcher=True)
        seen: list[float] = []
        with session_on(group, directory, flag=flag) as s:
            model = s.model(nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))
            last = s.model(nn.Linear(2, 2), name="last")
            first = s.optimizer(torch.optim.Adam(model.parameters(), 0.01))
            s.optimizer(torch.optim.SGD(last.parameters(), 0.1, momentum=0.9))
            scheduler = s.scheduler(torch.optim.lr_scheduler.ExponentialLR(first, 0.9))
            sums = s.keep(Sums(), name="sums")
            batches = s.loader(TensorDataset(*points(48)), global_batch=16)
            others = s.loader(TensorDataset(torch.arange(48.0)), global_batch=6)
            with suppress(InterruptedTraining):
                for _ in s.epochs(2):
                    drawn = iter(others)
                    for batch in batches:
                        inputs, targets = pair_of(batch)
                        noise = torch.randn(2)
                        s.step(F.cross_entropy(last(model(inputs)) + noise, targets))
                        scheduler.step()
                        sums.total += float(s.sum(first_of(next(drawn)).sum()))
                        seen.append(sums.total + float(scheduler.get_last_lr()[0]))
                        if s.engine.context.progress.state.step == stop:
                            flag.name = "SIGTERM"
            return seen, weights_of(model, last)

    whole = run_ranks(world_size, body, tmp_path / "whole", None)
    stopped = run_ranks(world_size, body, tmp_path / "legs", 1)
    resumed = run_ranks(world_size, body, tmp_path / "legs", None)
    for before, after, at_once in zip(stopped, resumed, whole, strict=True):
        assert len(before[0]) == 2
        assert before[0] + after[0] == at_once[0]
        assert all(map(torch.equal, after[1], at_once[1]))


def test_in_fp16_gradients_are_added_up_before_they_are_unscaled(tmp_path: Path) -> None:
    def body(group: Group) -> None:
        with session_on(group, tmp_path, {"precision": "fp16"}) as s:
            model = s.model(net())
            s.optimizer(sgd(model))
            inputs, targets = points()
            s.backward(F.cross_entropy(model(inputs), targets))
            grads = [p.grad.norm() for p in model.parameters() if p.grad is not None]
            assert 1e-4 < float(max(grads)) < 10  # not times 65,536
            with pytest.raises(UsageError, match=r"say s\.backward\(loss, more=True\)"):
                s.backward(F.cross_entropy(model(inputs), targets))
            s.update()
            s.backward(F.cross_entropy(model(inputs), targets))

    run_ranks(1, body)


class Sums:
    """A state of the script's own."""

    def __init__(self) -> None:
        self.total = 0.0

    def state_dict(self) -> dict[str, object]:
        return {"total": self.total, "parts": (1, torch.ones(2))}

    def load_state_dict(self, state_dict: dict[str, object], /) -> None:
        assert isinstance(state_dict["parts"], tuple)
        self.total = float(str(state_dict["total"]))


def plain_losses(epochs: int) -> list[float]:
    """The mean loss of each epoch's samples in a plain loop, while it trains."""
    seed_everything(0)
    model = net()
    optimizer = sgd(model)
    inputs, targets = points()
    means = []
    for epoch in range(epochs):
        total = 0.0
        for picked in torch.from_numpy(epoch_order(len(inputs), 0, epoch)).split(BATCH):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs[picked]), targets[picked])
            loss.backward()
            optimizer.step()
            total += loss.item() * len(picked)
        means.append(total / len(inputs))
    return means


@pytest.mark.parametrize("settings", [{}, {"shards": 5}], ids=["workers", "shards"])
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.core_cases(3)
def test_the_training_loss_is_the_mean_over_the_epochs_samples(
    world_size: int, settings: dict[str, OptionValue], tmp_path: Path
) -> None:
    def body(group: Group) -> None:
        with session_on(group, tmp_path, settings) as s:
            model = s.model(net())
            s.optimizer(sgd(model))
            batches = s.loader(TensorDataset(*points()), global_batch=BATCH)
            for _ in s.epochs(3):
                for x, y in map(pair_of, batches):
                    s.step(F.cross_entropy(model(x), y))

    run_ranks(world_size, body)
    found = [float(row["train_loss"]) for row in row_of(tmp_path)]
    assert found == pytest.approx(plain_losses(3), rel=1e-5)


def test_evaluations_and_snapshots_are_counted_by_the_clock(tmp_path: Path) -> None:
    def body(group: Group) -> None:
        with session_on(group, tmp_path, {"snapshot_every": "1h"}) as s:
            model = s.model(net())
            s.optimizer(sgd(model))
            s.loader(TensorDataset(*points()), global_batch=BATCH)
            test = s.eval_loader(TensorDataset(*points(11, seed=2)))
            s.begin()
            progress = s.engine.context.progress
            before_s = progress.state.elapsed_s
            s.evaluate(lambda _: {"ones": 1.0}, test)
            assert progress.state.eval_s is not None
            assert progress.state.eval_s > 0
            assert progress.state.elapsed_s == pytest.approx(before_s + progress.state.eval_s)
            progress.state.step = progress.state.step_in_epoch = 1
            s.engine.step.updated = 0
            assert not progress.due_to_save()
            progress.add_pause(3600.0)
            assert progress.due_to_save()
            s.snapshot()
            assert not progress.due_to_save()

    run_ranks(1, body)


@pytest.mark.parametrize("where", ["behind the step", "in a long evaluation"])
def test_a_snapshot_within_the_loop_over_batches_is_of_a_whole_step(
    where: str, tmp_path: Path
) -> None:
    """Behind `s.step` weights are a step ahead of what is counted: no batch is trained twice."""

    def body(group: Group, name: str, ends: bool) -> list[Tensor]:
        with session_on(group, tmp_path / name) as s:
            model = s.model(net())
            s.optimizer(sgd(model))
            batches = s.loader(TensorDataset(*points()), global_batch=BATCH)
            test = s.eval_loader(TensorDataset(*points(11, seed=2)))
            for _ in s.epochs(2):
                for x, y in map(pair_of, batches):
                    s.step(F.cross_entropy(model(x), y))
                    if s.steps_done == 2 and where == "behind the step":
                        s.snapshot(must=True)
                    elif s.steps_done == 2:
                        s.engine.context.progress.state.eval_s = 1e9  # so that it saves first
                        s.evaluate(lambda _: {"ones": 1.0}, test)
                    elif s.steps_done == 3 and ends:
                        raise ArithmeticError
            return weights_of(model)

    (whole,) = run_ranks(1, body, "whole", False)
    with pytest.raises(RankError, match="ArithmeticError"):
        run_ranks(1, body, "stopped", True)
    assert (tmp_path / "stopped" / "snapshots" / "step-000000000002").is_dir()
    (resumed,) = run_ranks(1, body, "stopped", False)
    assert all(map(torch.equal, resumed, whole))


def test_a_snapshot_that_counts_samples_in_another_order_is_refused(tmp_path: Path) -> None:
    def body(group: Group, order: int) -> None:
        vars(manager)["ORDER_VERSION"] = order
        with session_on(group, tmp_path) as s:
            model = s.model(net())
            s.optimizer(sgd(model))
            batches = s.loader(TensorDataset(*points()), global_batch=BATCH)
            for _ in s.epochs(2):
                for x, y in map(pair_of, batches):
                    s.step(F.cross_entropy(model(x), y))
                return

    run_ranks(1, body, 1)
    run_ranks(1, body, 1)
    with pytest.raises(RankError, match="in order 1, and this version of Paceline has order 2"):
        run_ranks(1, body, 2)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux alone")
def test_workers_of_one_node_exchange_what_they_know_without_the_backend(tmp_path: Path) -> None:
    """Its threads would take milliseconds, once a second."""

    def body(group: Group) -> int:
        with session_on(group, tmp_path, {}) as s:
            s.optimizer(sgd(s.model(net())))
            s.loader(TensorDataset(*points()), global_batch=BATCH)
            before = collectives_so_far()
            s.engine.agree()
            return collectives_so_far() - before

    assert run_ranks(2, body) == [0, 0]
