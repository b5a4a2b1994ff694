"""Loops of scripts in which a batch isn't an update, or something is missing."""

import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import cycle
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.optim.lr_scheduler import LinearLR, SequentialLR, StepLR
from torch.utils.data import TensorDataset

from paceline.distributed.group import Group
from paceline.errors import InterruptedTraining, SnapshotError
from paceline.training.batches.loader import Loader
from paceline.training.session import Session
from paceline.training.snapshots.model_weights import load_weights
from paceline.training.status_exchange import StopFlag
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


def training_set() -> TensorDataset:
    return TensorDataset(*points(8 * BATCH))


@contextmanager
def parts(
    group: Group, directory: Path, **settings: int
) -> Iterator[tuple[Session, torch.nn.Module, torch.optim.Optimizer, Loader]]:
    """A session with a model, an optimizer and eight batches an epoch."""
    with session_on(group, directory, settings) as s:
        model = s.model(net())
        optimizer = s.optimizer(sgd(model))
        yield s, model, optimizer, s.loader(training_set(), global_batch=BATCH)


def accumulate(
    group: Group, directory: Path, every: int, stop: int, promises: bool
) -> list[Tensor]:
    """Update with every third batch and the epoch's last; stop by a signal within batch `stop`."""
    with parts(group, directory, snapshot_every_steps=every) as (s, model, optimizer, batches):
        with suppress(InterruptedTraining):
            for _ in s.epochs(2):
                for place, (x, y) in enumerate(map(pair_of, batches), start=s.step_in_epoch):
                    if s.steps_done == stop:
                        s.engine.stop_flag.name = signal.SIGTERM.name
                        s.engine.context.progress.next_agreement = 0
                    is_last = place % 3 == 2 or place == 7
                    s.backward(F.cross_entropy(model(x), y), more=promises and not is_last)
                    if is_last:
                        optimizer.step()
                        optimizer.zero_grad()
        return weights_of(model)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("promises", [True, False], ids=["more", "plain"])
def test_gradients_that_are_added_up_are_in_no_snapshot_and_lost_by_none(
    world_size: int, promises: bool, tmp_path: Path
) -> None:
    whole = run_ranks(world_size, accumulate, tmp_path / "whole", 100, -1, promises)[0]
    # Snapshots due behind batches 2, 4 ... and a signal in the 4th wait for the update.
    run_ranks(world_size, accumulate, tmp_path / "legs", 2, 3, promises)
    saved = sorted(path.name for path in (tmp_path / "legs" / "snapshots").glob("step-*"))
    assert [int(name[5:]) for name in saved][-2:] == [3, 6]
    resumed = run_ranks(world_size, accumulate, tmp_path / "legs", 2, -1, promises)[0]
    assert all(map(torch.equal, resumed, whole))


def test_an_epoch_that_ends_with_unused_gradients_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def body(group: Group) -> None:
        with parts(group, tmp_path) as (s, model, optimizer, batches):
            for _ in s.epochs(2):
                for place, (x, y) in enumerate(map(pair_of, batches)):
                    s.backward(F.cross_entropy(model(x), y))
                    if place % 3 == 2:
                        optimizer.step()
                        optimizer.zero_grad()

    run_ranks(1, body)
    assert capfd.readouterr().out.count("gradients that no update has used yet") == 1


@pytest.mark.parametrize("updates_at", [(0, 1, 2, 3, 4), (0, 1, 2, 3, 4, 5)])
def test_an_epoch_that_is_left_at_an_untouched_batch_names_unused_gradients(
    updates_at: tuple[int, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def body(group: Group) -> None:
        with parts(group, tmp_path) as (s, model, optimizer, batches):
            for _ in s.epochs(1):
                for place, (x, y) in enumerate(map(pair_of, batches)):
                    if place == 6:
                        break
                    s.backward(F.cross_entropy(model(x), y))
                    if place in updates_at:
                        optimizer.step()
                        optimizer.zero_grad()

    run_ranks(1, body)
    told = capfd.readouterr().out.count("gradients that no update has used yet")
    assert told == int(5 not in updates_at)


def test_a_batch_at_which_the_loop_is_left_counts_if_it_was_trained_on(tmp_path: Path) -> None:
    def body(group: Group) -> list[int]:
        found = []
        with parts(group, tmp_path) as (s, model, _, batches):
            for epoch in s.epochs(2):
                for place, (x, y) in enumerate(map(pair_of, batches)):
                    if place == 5 and epoch == 0:
                        break
                    s.step(F.cross_entropy(model(x), y))
                    if place == 5:
                        break
                found.append(s.steps_done)
            found.append(s.engine.context.progress.state.samples_seen)
        return found

    assert run_ranks(1, body) == [[5, 11, 11 * BATCH]]


def test_a_loop_that_is_left_by_its_own_decision_has_ended(tmp_path: Path) -> None:
    def body(group: Group) -> str | None:
        with parts(group, tmp_path) as (s, model, _, batches):
            for _ in s.epochs(5):
                for x, y in map(pair_of, batches):
                    s.step(F.cross_entropy(model(x), y))
                break
        return s.engine.context.progress.state.ended

    assert run_ranks(1, body) == ["script"]


@pytest.mark.parametrize("lacks", ["loader", "optimizer", "scheduler", "nothing"])
def test_what_the_session_does_not_know_is_named_once(
    lacks: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = {
        "loader": "without a training loader that the session knows",
        "optimizer": "without an optimizer that the session knows",
        "scheduler": "a learning-rate scheduler that the session doesn't know",
    }

    def body(group: Group) -> None:
        with session_on(group, tmp_path) as s:
            model = s.model(net())
            optimizer = sgd(model)
            if lacks != "optimizer":
                s.optimizer(optimizer)
            scheduler = StepLR(optimizer, 1)
            if lacks not in ("scheduler", "optimizer"):
                s.scheduler(scheduler)
            batches: Iterable[object] = [points(BATCH)] * 2
            if lacks != "loader":
                batches = s.loader(training_set(), global_batch=BATCH)
            for _ in s.epochs(2):
                for x, y in map(pair_of, batches):
                    s.backward(F.cross_entropy(model(x), y))
                    optimizer.step()
                    optimizer.zero_grad()
                scheduler.step()

    run_ranks(1, body)
    said = capfd.readouterr().out
    assert {name: said.count(text) for name, text in words.items()} == {
        name: int(name == lacks) for name in words
    }
    assert "no s.step(loss)" not in said


def test_steps_behind_the_loader_are_named_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def body(group: Group) -> int:
        with parts(group, tmp_path) as (s, model, _, batches):
            longer = s.loader(TensorDataset(*points(11 * BATCH)), global_batch=BATCH)
            for _ in s.epochs(2):
                for batch, _ in zip(cycle(batches), longer, strict=False):
                    x, y = pair_of(batch)
                    s.step(F.cross_entropy(model(x), y))
        return s.engine.context.progress.state.step

    assert run_ranks(1, body) == [16]
    assert capfd.readouterr().out.count("such steps aren't counted") == 1


@pytest.mark.parametrize("stop", [3, 8, 9])  # within an epoch of 8 steps, at its end, in the next
@pytest.mark.parametrize("extra", [0, 2])
def test_each_epoch_has_a_pass_of_a_loader_beside_the_training_one(
    extra: int, stop: int, tmp_path: Path
) -> None:
    """With as many batches, or more: a zip leaves its pass open."""

    def body(group: Group, directory: Path, stop: int | None) -> list[tuple[int, int, int]]:
        seen, flag = [], StopFlag(under_launcher=True)
        with session_on(group, directory, flag=flag) as s:
            model = s.model(net())
            s.optimizer(sgd(model))
            batches = s.loader(training_set(), global_batch=BATCH)
            others = [
                s.loader(TensorDataset(torch.arange(count)), global_batch=1)
                for count in (8 + extra, 16)
            ]
            lasting = iter(others[1])  # goes through all epochs
            with suppress(InterruptedTraining):
                for epoch in s.epochs(2):
                    for batch, other in zip(batches, others[0], strict=False):
                        x, y = pair_of(batch)
                        s.step(F.cross_entropy(model(x), y))
                        seen.append((epoch, int(first_of(other)), int(first_of(next(lasting)))))
                        if s.engine.context.progress.state.step == stop:
                            flag.name = "SIGTERM"
        return seen

    (whole,) = run_ranks(1, body, tmp_path / "whole", None)
    assert [epoch for epoch, _, _ in whole] == [0] * 8 + [1] * 8
    assert len({other for epoch, other, _ in whole if epoch}) == 8
    (before,) = run_ranks(1, body, tmp_path / "legs", stop)
    (after,) = run_ranks(1, body, tmp_path / "legs", None)
    assert before + after == whole


@pytest.mark.parametrize("shards", [None, 2])
def test_a_loss_about_a_batch_to_evaluate_on_is_refused(shards: int | None, tmp_path: Path) -> None:
    """Each worker has another part of them, and what a resumed training gets would be others."""

    told = "a second training loader" if shards else r"s.loader\(data, shuffle=False\)"

    def body(group: Group) -> int:
        settings = {} if shards is None else {"shards": shards}
        with parts(group, tmp_path, **settings) as (s, model, _, batches):
            test = s.eval_loader(training_set(), batch_size=BATCH)
            for epoch in s.epochs(2):
                if epoch:
                    for _ in zip(batches, test, strict=False):
                        pass
                for x, y in map(pair_of, batches):
                    # A look at the model within a step is another matter.
                    with torch.no_grad():
                        assert all(model(u).isfinite().all() for u, _ in map(pair_of, test))
                    if s.step(F.cross_entropy(model(x), y)):
                        assert sum(1 for _ in test)
        return s.engine.context.progress.state.step

    with pytest.raises(RankError, match=told):
        run_ranks(2, body)


def test_an_epoch_without_a_step_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def body(group: Group) -> None:
        with parts(group, tmp_path) as (s, model, _, batches):
            for epoch in s.epochs(2):
                for x, y in map(pair_of, batches):
                    if epoch:
                        break
                    s.step(F.cross_entropy(model(x), y))

    run_ranks(1, body)
    assert capfd.readouterr().out.count("an epoch has ended without a step") == 1


def test_figures_of_a_second_evaluation_do_not_erase_those_of_the_first(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def body(group: Group) -> list[float | None]:
        found = []
        with parts(group, tmp_path) as (s, model, _, batches):
            test = s.eval_loader(TensorDataset(*points(11, seed=2)))
            other = s.eval_loader(TensorDataset(*points(7, seed=3)))
            for epoch in s.epochs(2):
                for x, y in map(pair_of, batches):
                    s.step(F.cross_entropy(model(x), y))
                s.evaluate(lambda _: {"loss": 1.0, "accuracy": 0.5}, test)
                s.evaluate(lambda _: {"own": 3.0}, test)
                s.evaluate(lambda _: {"accuracy": 0.5}, test)  # of the same data: no word
                if epoch == 1:
                    s.evaluate(lambda _: {"accuracy": 0.25}, other)
                found.append(s.engine.context.progress.state.val_accuracy)
        return found

    assert run_ranks(1, body) == [[0.5, 0.25]]
    assert capfd.readouterr().out.count("the last one's count as its validation") == 1
    last = (tmp_path / "metrics.csv").read_text().splitlines()
    columns = dict(zip(*(line.split(",") for line in (last[0], last[-1])), strict=True))
    assert (columns["val_loss"], columns["val_accuracy"], columns["val_own"]) == ("1", "0.25", "3")


@pytest.mark.parametrize("accuracy", [0.5, 49.0])
def test_an_accuracy_that_is_no_share_is_named(
    accuracy: float, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def body(group: Group) -> None:
        with parts(group, tmp_path) as (s, model, _, batches):
            test = s.eval_loader(TensorDataset(*points(11, seed=2)))
            for _ in s.epochs(2):
                for x, y in map(pair_of, batches):
                    s.step(F.cross_entropy(model(x), y))
                s.evaluate(lambda _: {"accuracy": accuracy}, test)

    run_ranks(1, body)
    assert capfd.readouterr().out.count("should lie between 0 and 1") == int(accuracy > 1)


class Cosine:
    """A schedule that is no scheduler of torch's, as libraries of models have it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._turn = optimizer, 0

    def step(self) -> None:
        self._turn += 1
        self._optimizer.param_groups[0]["weight_decay"] = 1e-2 * self._turn

    def state_dict(self) -> dict[str, object]:
        return {"turn": self._turn}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self._turn = int(str(state["turn"]))


class CrashError(Exception):
    """Ends a training at once."""


def change_around_batches(group: Group, directory: Path, stop: str) -> list[Tensor]:
    """Change rates, weights, schedules and values before and behind each epoch's batches."""
    flag = StopFlag(under_launcher=True)
    with suppress(CrashError), session_on(group, directory, {}, flag) as s:
        model = net()
        model.register_buffer("turns", torch.zeros(()))
        s.model(model)
        optimizer = s.optimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
        own = s.keep(Cosine(optimizer), name="own")
        step, kept = s.scheduler(StepLR(optimizer, 1, 0.7)), s.keep(turns=0)
        batches = s.loader(training_set(), global_batch=BATCH)
        with suppress(InterruptedTraining):
            for epoch in s.epochs(3):
                own.step()
                optimizer.param_groups[0]["momentum"] *= 0.9
                with torch.no_grad():
                    next(model.parameters()).mul_(0.5)
                next(reversed(list(model.parameters()))).data.mul_(0.5)
                model.register_buffer("turns", model.get_buffer("turns") + 1)
                for place, (x, y) in enumerate(map(pair_of, batches)):
                    s.step(F.cross_entropy(model(x), y))
                    if (epoch, place, stop) == (1, 3, "within"):
                        flag.name = "SIGTERM"
                own.step()
                step.step()
                kept.turns += 1
                if (epoch, stop) == (1, "behind"):
                    s.snapshot(must=True)
                    s.engine.snapshots.flush()
                    s.barrier()
                    raise CrashError
                s.log(rate=optimizer.param_groups[0]["lr"])
        options = optimizer.param_groups[0]
        figures = [options["lr"], options["momentum"], options["weight_decay"], kept.turns]
        return [torch.tensor(figures), model.get_buffer("turns"), *weights_of(model)]
    return []


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stop", ["within", "behind"])
@pytest.mark.core_cases(3)
def test_what_a_loop_changes_around_its_batches_is_changed_once(
    stop: str, world_size: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A resumed training runs the lines around an epoch's batches again."""
    whole = run_ranks(world_size, change_around_batches, tmp_path / "whole", "never")[0]
    run_ranks(world_size, change_around_batches, tmp_path / "legs", stop)
    capfd.readouterr()
    resumed = run_ranks(world_size, change_around_batches, tmp_path / "legs", "never")[0]
    assert all(map(torch.equal, resumed, whole))
    said = capfd.readouterr().out
    changed = "momentum, weight_decay, own, weights"
    assert said.count(f"as in the snapshot again: {changed}\n") == 1


class Holding:
    """Keeps schedulers for a script, as trainers do; has no `__dict__`."""

    __slots__ = ("schedulers",)

    def __init__(self, schedulers: dict[str, StepLR]) -> None:
        self.schedulers = schedulers

    def state_dict(self) -> dict[str, object]:
        return {name: one.state_dict() for name, one in self.schedulers.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, one in self.schedulers.items():
            one.load_state_dict(state[name])


@pytest.mark.parametrize("is_made_in_loop", [True, False])
def test_a_scheduler_that_the_loop_makes_is_named(
    is_made_in_loop: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A resumed one begins anew, with the rate that it sets itself."""

    def train(s: Session, model: torch.nn.Module, batches: Loader, stop: int | None) -> None:
        optimizer = s.engine.context.components.optimizers[0]
        warm_up = LinearLR(optimizer, 0.001, total_iters=7) if is_made_in_loop else None
        for x, y in map(pair_of, batches):
            s.step(F.cross_entropy(model(x), y))
            if warm_up is not None:
                warm_up.step()
            if s.steps_done == stop:
                s.engine.stop_flag.name = "SIGTERM"

    def body(group: Group, stop: int | None) -> float:
        with parts(group, tmp_path) as (s, model, optimizer, batches):
            after = StepLR(optimizer, 1, 0.5)
            s.scheduler(SequentialLR(optimizer, [after, StepLR(optimizer, 1)], [5]))
            s.keep(Holding({"last": StepLR(optimizer, 3)}), name="held")
            with suppress(InterruptedTraining):
                for _ in s.epochs(1):
                    train(s, model, batches, stop)
            return float(optimizer.param_groups[0]["lr"])

    run_ranks(1, body, 4)
    (rate,) = run_ranks(1, body, None)
    assert rate <= 0.1
    said = capfd.readouterr().out
    assert said.count("a learning-rate scheduler that the session doesn't know") == is_made_in_loop
    assert "as in the snapshot again" not in said


def read_ahead(batches: Iterable[object]) -> Iterator[object]:
    """Give each batch when the next one has been asked for, as prefetchers do."""
    given = iter(batches)
    held = next(given)
    for batch in given:
        yield held
        held = batch
    yield held


def test_a_loop_that_runs_behind_its_loader_is_named_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def body(group: Group) -> None:
        with parts(group, tmp_path) as (s, model, _, batches):
            for _ in s.epochs(2):
                for x, y in map(pair_of, read_ahead(batches)):
                    s.step(F.cross_entropy(model(x), y))

    run_ranks(1, body)
    said = capfd.readouterr().out
    assert said.count("asks for the next batch before it has trained on the one before") == 1
    assert "such steps aren't counted" not in said


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_loader_that_another_thread_iterates_is_refused(
    world_size: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Although the main thread waits for what that one reads."""

    def body(group: Group) -> None:
        def read(batches: Loader) -> None:
            for batch in batches:
                found.put(batch)

        found = Queue[object]()
        with parts(group, tmp_path) as (s, _, _, batches):
            for _ in s.epochs(1):
                Thread(target=read, args=[batches], daemon=True).start()
                found.get()

    with pytest.raises(RankError):
        run_ranks(world_size, body)
    assert "iterated in another thread" in capfd.readouterr().err


def test_a_loader_that_is_trained_on_behind_another_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first one to shuffle, a dictionary's `val`, say, is the training's."""

    def body(group: Group) -> None:
        with parts(group, tmp_path) as (s, model, _, val):
            train = s.loader(training_set(), global_batch=BATCH)
            for _ in s.epochs(1):
                for x, y in map(pair_of, train):
                    s.step(F.cross_entropy(model(x), y))
                assert sum(1 for _ in val) == 8

    run_ranks(1, body)
    said = capfd.readouterr().out
    assert said.count("weren't about batches of the training loader") == 1
    assert "no s.step(loss)" not in said


@pytest.mark.parametrize("is_known", [True, False])
def test_an_optimizer_that_steps_within_the_backward_pass_is_refused(
    is_known: bool, tmp_path: Path
) -> None:
    def body(group: Group) -> None:
        with session_on(group, tmp_path) as s:
            model = s.model(net())
            for parameter in model.parameters():
                optimizer = torch.optim.SGD([parameter], 0.1)
                if is_known:
                    s.optimizer(optimizer)
                parameter.register_post_accumulate_grad_hook(
                    lambda _, optimizer=optimizer: optimizer.step()
                )
            batches = s.loader(training_set(), global_batch=BATCH)
            for _ in s.epochs(1):
                for x, y in map(pair_of, batches):
                    s.backward(F.cross_entropy(model(x), y))

    with pytest.raises(RankError, match=r"SGD.step\(\) within the backward pass"):
        run_ranks(2, body)


def test_a_hook_that_drops_gradients_is_named(tmp_path: Path) -> None:
    def body(group: Group) -> None:
        drops: list[int] = []

        def drop(parameter: Tensor) -> None:
            if drops:
                parameter.grad = None

        with session_on(group, tmp_path) as s:
            model = net()
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(drop)
            s.optimizer(sgd(s.model(model)))
            batches = s.loader(training_set(), global_batch=BATCH)
            for _ in s.epochs(1):
                for place, (x, y) in enumerate(map(pair_of, batches)):
                    drops += [place] * (place == 2)
                    s.step(F.cross_entropy(model(x), y))

    with pytest.raises(RankError, match=r"the gradient of .* is gone within the backward pass"):
        run_ranks(2, body)


def test_other_layers_that_keep_an_original_get_no_advice_on_pruning() -> None:
    narrow, wide = (nn.utils.spectral_norm(nn.Linear(2, width)) for width in (3, 4))
    with pytest.raises(SnapshotError, match="weight_orig has shape") as caught:
        load_weights(wide, narrow.state_dict())
    assert "prune" not in str(caught.value)


@pytest.mark.parametrize("prepared", [True, False])
def test_a_model_that_its_loop_prunes_resumes_where_it_has_the_names(
    prepared: bool, tmp_path: Path
) -> None:
    def body(group: Group, directory: Path, stop: int | None) -> list[Tensor]:
        flag = StopFlag(under_launcher=True)
        with session_on(group, directory, flag=flag) as s, suppress(InterruptedTraining):
            model = net()
            if prepared:
                prune.identity(model[0], "weight")
            s.optimizer(sgd(s.model(model)))
            batches = s.loader(training_set(), global_batch=BATCH)
            for epoch in s.epochs(3):
                if epoch == 1:
                    prune.l1_unstructured(model[0], "weight", amount=0.5)
                for x, y in map(pair_of, batches):
                    s.step(F.cross_entropy(model(x), y))
                    flag.name = "SIGTERM" if s.steps_done == stop else None
        return weights_of(model)

    [whole] = run_ranks(1, body, tmp_path / "whole", None)
    run_ranks(1, body, tmp_path / "legs", 11)
    if prepared:
        assert all(map(torch.equal, run_ranks(1, body, tmp_path / "legs", None)[0], whole))
    else:
        with pytest.raises(RankError, match=r"prune\.identity\(layer, 'weight'\) before"):
            run_ranks(1, body, tmp_path / "legs", None)
