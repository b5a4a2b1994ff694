"""A session's loaders give what scripts ask a torch DataLoader for."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from operator import itemgetter
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

from paceline.distributed.group import Group
from paceline.errors import InterruptedTraining, UsageError
from paceline.training.batches.loader import Loader
from paceline.training.status_exchange import StopFlag
from tests.support.ranks import run_ranks
from tests.support.sessions import (
    BATCH,
    EPOCHS,
    SAMPLES,
    assert_weights,
    net,
    pair_of,
    plain_loop,
    points,
    session_on,
    sgd,
    weights_of,
)

pytestmark = pytest.mark.ranks


class Stream(IterableDataset[Tensor]):
    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(points()[0])


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_training_loader_looks_as_the_dataloader_of_one_process(
    world_size: int, tmp_path: Path
) -> None:
    def body(group: Group) -> None:
        data = TensorDataset(*points())
        plain = DataLoader(data, batch_size=BATCH, shuffle=True, drop_last=True)
        with session_on(group, tmp_path) as s:
            (loader,) = s.prepare(plain)
            assert len(loader) == len(plain) == SAMPLES // BATCH
            assert loader.dataset is data
            assert len(loader.dataset) == SAMPLES
            assert loader.batch_size == BATCH
            assert loader.drop_last is True
            assert isinstance(loader.sampler, RandomSampler)
            assert len(loader.sampler) == SAMPLES
            assert sorted(loader.sampler) == list(range(SAMPLES))
            assert loader.num_workers == 0
            assert loader.collate_fn is plain.collate_fn

    run_ranks(world_size, body)


@pytest.mark.parametrize("settings", [{}, {"shards": 4}])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.core_cases(3)
def test_an_evaluation_loader_has_as_many_batches_as_it_says(
    world_size: int, settings: dict[str, int], tmp_path: Path
) -> None:
    def body(group: Group) -> int:
        data = TensorDataset(*points())
        with session_on(group, tmp_path, settings) as s:
            loader = s.eval_loader(data, batch_size=7)
            assert len(loader) == len(list(loader))
            assert loader.dataset is data
            assert (loader.batch_size, loader.drop_last) == (7, False)
            assert list(loader.sampler) == list(range(SAMPLES))
            return len(loader)

    counts = run_ranks(world_size, body)
    if world_size == 1 and not settings:
        assert counts == [-(-SAMPLES // 7)]


def test_a_stream_has_no_length(tmp_path: Path) -> None:
    def body(group: Group) -> None:
        with session_on(group, tmp_path) as s:
            for loader in (s.loader(Stream(), global_batch=BATCH), s.eval_loader(Stream())):
                with pytest.raises(TypeError, match="a stream has no length"):
                    len(loader)

    run_ranks(1, body)


@pytest.mark.parametrize("settings", [{}, {"shards": 4}])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.core_cases(2)
def test_a_test_loader_that_shuffles_can_be_evaluated_on(
    world_size: int, settings: dict[str, int], tmp_path: Path
) -> None:
    inputs, targets = points(30, seed=4)

    def body(group: Group) -> tuple[list[Tensor], float, float]:
        with session_on(group, tmp_path / str(world_size), settings) as s:
            plain = net()
            model, _, train, test = s.prepare(
                plain,
                sgd(plain),
                DataLoader(TensorDataset(*points()), batch_size=BATCH, shuffle=True),
                DataLoader(TensorDataset(inputs, targets), batch_size=9, shuffle=True),
            )

            def judge(batch: object) -> dict[str, Tensor]:
                assert isinstance(batch, list)
                return {"right": model(batch[0]).argmax(1) == batch[1]}

            for _ in s.epochs(EPOCHS):
                for x, y in train:
                    s.step(F.cross_entropy(model(x), y))
                found = s.evaluate(judge, test)["right"]  # type: ignore[arg-type]  # as prepare gives it
                trained = s.evaluate(judge, train)["right"]  # type: ignore[arg-type]  # likewise
            return weights_of(model), found, trained

    expected = net()
    for parameter, value in zip(expected.parameters(), plain_loop(), strict=True):
        parameter.data = value

    def share(model: nn.Module, x: Tensor, y: Tensor) -> float:
        return float((model(x).argmax(1) == y).float().mean())

    for weights, found, trained in run_ranks(world_size, body):
        assert_weights(weights, plain_loop())
        assert found == pytest.approx(share(expected, inputs, targets))
        assert trained == pytest.approx(share(expected, *points()))


def test_an_unprepared_loader_is_refused(tmp_path: Path) -> None:
    def body(group: Group) -> None:
        with session_on(group, tmp_path) as s, pytest.raises(UsageError, match=r"not a DataLoader"):
            s.evaluate(lambda _: {}, DataLoader(TensorDataset(*points())))  # type: ignore[arg-type]

    run_ranks(1, body)


def test_a_whole_model_is_saved_as_it_would_be_without_a_session(tmp_path: Path) -> None:
    """It loads where nothing but torch's own classes is allowed, and is the module of its class."""

    def body(group: Group) -> None:
        with session_on(group, tmp_path / "run", {"shards": 2}) as s:
            model = s.model(net())
            s.optimizer(sgd(model))
            batches = s.loader(TensorDataset(*points()), global_batch=BATCH)
            for _ in s.epochs(1):
                for batch in batches:
                    x, y = pair_of(batch)
                    s.step(F.cross_entropy(model(x), y))
                if s.is_main:
                    torch.save(model, tmp_path / "whole.pt")
            path = tmp_path / "whole.pt"
            if s.is_main:
                with torch.serialization.safe_globals([nn.Sequential, nn.Linear, nn.Tanh, set]):
                    loaded = torch.load(path, weights_only=True)
                assert vars(loaded).keys() == vars(net()).keys()
                assert_weights(weights_of(loaded), weights_of(model), atol=0)
                assert torch.equal(loaded(points()[0]), model(points()[0]))

    run_ranks(2, body)


WRAPPED: dict[str, Callable[[Loader], Iterable[object]]] = {
    "plain": lambda batches: batches,
    "generator": lambda batches: (batch for batch in batches),
    "zip": lambda batches: map(itemgetter(0), zip(batches, range(99), strict=False)),
}


@pytest.mark.parametrize(
    ("start", "wrapped", "told"),
    [
        ("1", "generator", 1),
        ("s.step_in_epoch", "zip", 0),
        ("", "plain", 0),
    ],
)
def test_batches_that_are_counted_anew_in_a_resumed_epoch_are_named(
    start: str, wrapped: str, told: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The epoch before was left after 6 of its 8 batches, and the stop is after 3 more."""

    def body(group: Group, stop: int | None) -> list[int]:
        places = []
        flag = StopFlag(under_launcher=True)
        with session_on(group, tmp_path, flag=flag) as s, suppress(InterruptedTraining):
            model = s.model(net())
            s.optimizer(sgd(model))
            batches = s.loader(TensorDataset(*points(8 * BATCH)), global_batch=BATCH)
            for epoch in s.epochs(2):
                given = WRAPPED[wrapped](batches)
                first = {"": 0, "0": 0, "1": 1}.get(start, s.step_in_epoch)
                counted = enumerate(given, first) if start else ((0, b) for b in given)
                for place, batch in counted:
                    places.append(place)
                    x, y = pair_of(batch)
                    s.step(F.cross_entropy(model(x), y))
                    flag.name = "SIGTERM" if s.steps_done == stop else None
                    if (epoch, s.step_in_epoch) == (0, 6):
                        break
        return places

    run_ranks(1, body, 9)
    assert "count anew" not in capfd.readouterr().out
    [places] = run_ranks(1, body, None)
    assert capfd.readouterr().out.count("resumed behind batch 3 of this epoch") == told
    assert start != "s.step_in_epoch" or places == [3, 4, 5, 6, 7]
