"""What a script hands over as data, and what becomes of it."""

import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from paceline.data.augment import RandomFlip
from paceline.data.loading import sampled
from paceline.data.loading.loader import LoaderSource
from paceline.data.loading.sampled import SampledOrder
from paceline.data.memory import synthetic_images
from paceline.data.order import EpochPlan
from paceline.distributed.group import Group
from paceline.distributed.placement import Placement
from paceline.errors import DataError, JobError, UsageError
from paceline.training.batches.sources import DataSource, describe_data, make_source
from paceline.training.config import TrainConfig
from tests.support.ranks import RankError, run_ranks
from tests.support.sessions import points, session_on, sgd

pytestmark = pytest.mark.ranks
WORLDS = [1, 2, 3]


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.core_cases(2)
def test_a_torch_loader_is_taken_at_its_word(world_size: int, tmp_path: Path) -> None:
    """Batch size, order, and whether the short batch is left out."""

    def body(group: Group) -> tuple[list[list[float]], int]:
        data = TensorDataset(torch.arange(20.0))
        given: DataLoader[object] = DataLoader(data, batch_size=6, drop_last=True)
        with session_on(group, tmp_path) as s:
            s.optimizer(sgd(s.model(nn.Linear(1, 1))))
            batches = s.loader(given)
            for _ in s.epochs(2):
                seen = [batch.content for batch in batches.batches()]
            return [x[0].tolist() for x in seen], len(batches)  # type: ignore[index]

    found = run_ranks(world_size, body)
    steps = [[x for seen, _ in found for x in seen[step]] for step in range(3)]
    assert steps == [[float(6 * step + i) for i in range(6)] for step in range(3)]
    assert {length for _, length in found} == {3}


def test_samples_are_images_where_that_is_known() -> None:
    images = DataSource(data=synthetic_images(4, 1, 8, 8, 2, seed=0))
    assert images.unit == "images"
    assert describe_data(TensorDataset(torch.zeros(4, 3))).unit == "samples"


def test_drop_last_false_keeps_the_short_batch(tmp_path: Path) -> None:
    def body(group: Group) -> int:
        with session_on(group, tmp_path) as s:
            return len(s.loader(TensorDataset(*points()), global_batch=8, drop_last=False))

    assert run_ranks(1, body) == [7]


class Turning(Sampler[int]):
    """Counts its epochs itself, and begins each one further on."""

    def __init__(self) -> None:
        self._epoch = 0

    def __iter__(self) -> Iterator[int]:
        self._epoch += 1
        return iter([(i * i + self._epoch) % 50 for i in range(21)])


class ByEpoch(Sampler[int]):
    """Knows the epoch when it is told."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(i * i + self.epoch) % 50 for i in range(21)])

    def __len__(self) -> int:
        return 21


def fixed() -> torch.Generator:
    return torch.Generator().manual_seed(3)


class Buckets(Sampler[list[int]]):
    """Batches of unequal sizes, one of a single sample, in another order in each epoch."""

    def __init__(self) -> None:
        self._random = random.Random(3)

    def __iter__(self) -> Iterator[list[int]]:
        start = self._random.randrange(5)  # so that other epochs' largest batch is larger
        cuts = [start, start + 1, start + 9, start + 14, 30, 50 - start]
        batches = [list(range(a, b)) for a, b in itertools.pairwise(cuts)]
        self._random.shuffle(batches)
        return iter(batches)


SAMPLERS: dict[str, Callable[[], Sampler[Any]]] = {
    "weighted": lambda: WeightedRandomSampler([1.0, 3.0] * 25, 21, generator=fixed()),
    "subset": lambda: SubsetRandomSampler(range(10, 31), generator=fixed()),
    "few": lambda: RandomSampler(range(50), num_samples=21, generator=fixed()),
    "with replacement": lambda: RandomSampler(range(50), replacement=True, generator=fixed()),
    "own": Turning,
    "by epoch": ByEpoch,
    "batches": Buckets,
}


def loader_of(sampler: Sampler[Any]) -> DataLoader[object]:
    if isinstance(sampler, Buckets):
        return DataLoader(TensorDataset(torch.arange(50.0)), batch_sampler=sampler)
    return DataLoader(TensorDataset(torch.arange(50.0)), batch_size=8, sampler=sampler)


def plain_batches(sampler: Sampler[Any], epochs: int) -> list[list[float]]:
    """What a plain loop goes through."""
    loader, listed = loader_of(sampler), []
    for epoch in range(epochs):
        if isinstance(sampler, ByEpoch):
            sampler.set_epoch(epoch)
        listed += [x.tolist() for (x,) in loader]
    return listed


def session_batches(group: Group, directory: Path, name: str, epochs: int) -> list[list[float]]:
    """This worker's shares."""
    with session_on(group, directory) as s:
        model = s.model(nn.Linear(1, 1))
        s.optimizer(sgd(model))
        (batches,) = s.prepare(loader_of(SAMPLERS[name]()))
        seen = []
        for _ in s.epochs(epochs):
            for batch in batches.batches():  # type: ignore[attr-defined]
                (x,) = batch.content
                seen.append(x.tolist()[: batch.local])
                s.step(model(x.unsqueeze(1)).mean() * 1e-3)
        return seen


def joined(shares: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    return [[x for share in step for x in share] for step in zip(*shares, strict=True)]


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.core_cases(4)
def test_a_sampler_of_the_scripts_own_is_shared(name: str, world_size: int, tmp_path: Path) -> None:
    """Its batches are those of a plain loop, resumed on another number of workers as well."""
    plain = plain_batches(SAMPLERS[name](), 3)
    first = joined(run_ranks(world_size, session_batches, tmp_path, name, 2))
    then = joined(run_ranks(3, session_batches, tmp_path, name, 3))
    assert first + then == plain


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_sampler_without_a_generator_draws_alike_everywhere(
    world_size: int, tmp_path: Path
) -> None:
    def body(group: Group) -> list[list[float]]:
        with session_on(group, tmp_path / str(group.world_size)) as s:
            model = s.model(nn.Linear(1, 1))
            s.optimizer(sgd(model))
            weights = [0.0, 1.0] * 25
            batches = s.loader(loader_of(WeightedRandomSampler(weights, 60)))
            assert len(batches) == 8
            torch.rand(group.rank)  # what a worker has drawn before has no part in it
            seen = []
            for _ in s.epochs(2):
                for batch in batches.batches():
                    seen.append(batch.indices.tolist())
                    s.step(model(torch.ones(1, 1)).mean())
            return seen

    (alone,) = run_ranks(1, body)
    if world_size > 1:
        assert joined(run_ranks(world_size, body)) == alone
    drawn = [index for batch in alone for index in batch]
    assert len(drawn) == 120
    assert all(index % 2 for index in drawn)
    assert drawn[:60] != drawn[60:]


def test_evaluations_go_through_what_a_sampler_draws(tmp_path: Path) -> None:
    """The usual split of one data set by two samplers."""

    def body(group: Group) -> list[float]:
        with session_on(group, tmp_path) as s:
            s.optimizer(sgd(s.model(nn.Linear(1, 1))))
            train = s.loader(loader_of(SubsetRandomSampler(range(37))))
            given = loader_of(SubsetRandomSampler(range(37, 50)))
            valid, further = s.eval_loader(given), s.loader(given)
            for _ in s.epochs(1):
                pass
            return [
                s.evaluate(lambda batch: {"value": batch[0]}, loader)["value"]  # type: ignore[index]
                for loader in (valid, further, train)
            ]

    for found in run_ranks(3, body):
        assert found == [43.0, 43.0, 18.0]


def test_an_evaluation_by_hand_counts_each_sample_once(tmp_path: Path) -> None:
    """Also of a loader that shuffles, whose last batch has a sample for one worker alone."""

    def body(group: Group) -> list[int]:
        with session_on(group, tmp_path) as s:
            s.optimizer(sgd(s.model(nn.Linear(1, 1))))
            s.loader(TensorDataset(*points()), global_batch=8)
            given = DataLoader(TensorDataset(torch.arange(50.0)), batch_size=7, shuffle=True)
            (test,) = s.prepare(given)
            found = []
            for _ in s.epochs(2):
                with torch.no_grad():
                    found.append(int(s.sum(sum(len(x) for (x,) in test))))
            return found

    assert run_ranks(3, body) == [[50, 50]] * 3


def test_a_sampler_that_follows_the_rank_is_an_error(tmp_path: Path) -> None:
    def body(group: Group) -> None:
        with session_on(group, tmp_path) as s:
            s.loader(loader_of(SubsetRandomSampler(range(group.rank, 50, 2))))

    with pytest.raises(RankError, match=r"the workers differ: rank 1 .* order of samples"):
        run_ranks(2, body)


def test_a_sampler_that_draws_fewer_later_is_an_error() -> None:
    lengths = iter([3, 2])

    class Shrinking(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(next(lengths)))

    with pytest.raises(DataError, match="Shrinking drew 2 samples in epoch 2 and 3 in the first"):
        SampledOrder(Shrinking(), 0).of(1)


def test_a_sample_that_is_drawn_twice_is_changed_twice() -> None:
    class Noise(Dataset[float]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> float:
            return float(torch.rand(()))

    order = SampledOrder([2, 2, 2, 2], 0)
    with closing(LoaderSource(Noise(), loader_workers=0, order=order)) as source:
        plan = EpochPlan(seed=0, epoch=0, global_batch=4)
        batches = [next(source.train_batches(plan)).content for _ in range(2)]
    assert len(set(batches[0].tolist())) == 4  # type: ignore[attr-defined]
    assert torch.equal(batches[0], batches[1])  # type: ignore[arg-type]


class Endless(Sampler[Any]):
    """As trainers that count iterations have it."""

    def __init__(self, item: int | list[int]) -> None:
        self._item = item

    def __iter__(self) -> Iterator[Any]:
        return itertools.repeat(self._item)


@pytest.mark.parametrize(
    ("sampler", "told"),
    [
        (Endless(1), "Endless draws more than 60 samples"),
        (Endless([1, 2]), "Endless draws more than 60 samples"),
        # It says so itself: nothing is drawn.
        (
            RandomSampler(range(3), replacement=True, num_samples=10**10),
            "RandomSampler draws 10,000,000,000 samples",
        ),
    ],
)
def test_a_sampler_without_an_end_is_an_error(
    sampler: Sampler[Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampled, "_MOST_DRAWN", 10)
    in_batches = not isinstance(next(iter(sampler)), int)
    order = SampledOrder(sampler, 0, in_batches=in_batches, samples=3)
    with pytest.raises(DataError, match=f"the {told}, without an end"):
        len(order)


class Unsure(Sampler[Any]):
    """Doesn't know its length."""

    def __init__(self) -> None:
        pass

    def __len__(self) -> int:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("sampler", "count"),
    [(Unsure(), 3), (RandomSampler(range(3), replacement=True, num_samples=99), 99)],
)
def test_a_long_sampler_has_an_end_and_none_needs_a_length(
    sampler: Sampler[Any], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampled, "_MOST_DRAWN", 10)
    assert len(SampledOrder(sampler, 0, samples=3)) == count


class Scaling(DataLoader[object]):
    """Changes the batches on their way, as loaders that move them to a device do."""

    def __iter__(self) -> Any:
        return (2 * x for (x,) in super().__iter__())


class Lasting(DataLoader[object]):
    """Keeps its processes through all epochs."""

    def _get_iterator(self) -> Any:
        return super()._get_iterator()


POINTS = TensorDataset(*points())
REFUSED: dict[str, Callable[[], DataLoader[object]]] = {
    "DistributedSampler shares samples between workers": lambda: DataLoader(
        POINTS, batch_size=8, sampler=DistributedSampler(POINTS, num_replicas=2, rank=0)
    ),
    "its data set gives whole batches": lambda: DataLoader(POINTS, batch_size=None),
    "Scaling is a DataLoader with its own __iter__, which would be left out": lambda: Scaling(
        POINTS, batch_size=8
    ),
    "Lasting is a DataLoader with its own _get_iterator": lambda: Lasting(POINTS, batch_size=8),
    "the list gives no batch": lambda: DataLoader(POINTS, batch_sampler=[]),
    "made by a list": lambda: DataLoader(
        synthetic_images(4, 1, 8, 8, 2, seed=0),  # type: ignore[arg-type]
        batch_sampler=[[1, 2]],
    ),
    "gives whole batches": lambda: DataLoader(Stream(20), batch_size=None),
    "a SubsetRandomSampler, which TensorData": lambda: DataLoader(
        synthetic_images(4, 1, 8, 8, 2, seed=0),  # type: ignore[arg-type]
        batch_size=2,
        sampler=SubsetRandomSampler([1, 2]),
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_orders_that_cannot_be_shared_are_refused(what: str, tmp_path: Path) -> None:
    def body(group: Group) -> str:
        with session_on(group, tmp_path) as s, pytest.raises(UsageError) as caught:
            s.loader(REFUSED[what]())
        return str(caught.value)

    assert what in run_ranks(1, body)[0]


def test_an_order_that_is_said_twice_is_refused(tmp_path: Path) -> None:
    def body(group: Group) -> None:
        with session_on(group, tmp_path) as s:
            s.loader(loader_of(Turning()), shuffle=True)

    with pytest.raises(RankError, match="shuffle=True beside a DataLoader whose Turning"):
        run_ranks(1, body)


class Stream(IterableDataset[object]):
    """Counts up, `samples` numbers an epoch."""

    def __init__(self, samples: int, first: float = 0.0) -> None:
        self._samples, self._first = samples, first

    def __iter__(self) -> Iterator[object]:
        return (torch.tensor([self._first + i]) for i in range(self._samples))


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.core_cases(2)
def test_a_stream_has_one_order_on_any_number_of_workers(world_size: int, tmp_path: Path) -> None:
    def body(group: Group) -> tuple[list[list[float]], int]:
        with session_on(group, tmp_path) as s:
            model = s.model(nn.Linear(1, 1))
            s.optimizer(sgd(model))
            batches = s.loader(Stream(20), global_batch=6)
            with pytest.raises(TypeError, match="no length"):
                len(batches)
            seen = []
            for _ in s.epochs(2):
                for batch in batches.batches():
                    x = batch.content
                    assert isinstance(x, Tensor)
                    seen.append(x.flatten().tolist()[: batch.local])
                    s.step(model(x).mean() * 1e-3)
            return seen, s.engine.context.progress.state.samples_seen

    found = run_ranks(world_size, body)
    assert {samples for _, samples in found} == {40}
    steps = [
        [x for share in shares for x in share]
        for shares in zip(*(seen for seen, _ in found), strict=True)
    ]
    pass_ = [[float(i) for i in range(start, min(start + 6, 20))] for start in range(0, 20, 6)]
    assert steps == 2 * pass_


def test_streams_that_differ_between_workers_are_an_error(tmp_path: Path) -> None:
    def body(group: Group) -> str:
        with session_on(group, tmp_path) as s:
            model = s.model(nn.Linear(1, 1))
            s.optimizer(sgd(model))
            batches = s.loader(Stream(20, first=group.rank), global_batch=6)
            for _ in s.epochs(1):
                with pytest.raises(DataError) as caught:
                    list(batches)
                return str(caught.value)
        return ""

    assert all("read different samples" in message for message in run_ranks(2, body))


def test_data_sets_of_unequal_size_are_an_error(tmp_path: Path) -> None:
    def body(group: Group) -> None:
        with session_on(group, tmp_path) as s:
            s.loader(TensorDataset(*points(20 + group.rank)), global_batch=8)

    with pytest.raises(RankError, match=r"rank 1 on .* of 21 samples, .*, rank 0 on .* of 20 s"):
        run_ranks(2, body)


@pytest.mark.parametrize("what", ["labels", "global_batch", "shuffle", "drop_last"])
@pytest.mark.core_cases(2)
def test_what_differs_in_the_data_is_named(what: str, tmp_path: Path) -> None:
    def body(group: Group) -> str:
        inputs, labels = points(20)
        differs = what if group.rank == 2 else ""
        data = TensorDataset(inputs, 1 - labels if differs == "labels" else labels)
        with session_on(group, tmp_path) as s, pytest.raises(JobError) as error:
            s.loader(
                data,
                global_batch=10 if differs == "global_batch" else 8,
                shuffle=differs != "shuffle",
                drop_last=differs == "drop_last",
            )
        return str(error.value)

    (message,) = set(run_ranks(3, body))
    named = "data set TensorDataset of 20 samples" if what == "labels" else what
    assert re.search(f"rank 2 on .* has {named}.*, rank 0 on", message)
    assert "rank 1" not in message


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.core_cases(True)
def test_subsets_that_were_drawn_apart_are_an_error(trains: bool, tmp_path: Path) -> None:
    def body(group: Group) -> str:
        data = TensorDataset(*points(30))
        torch.manual_seed(group.rank)  # as processes of torchrun, which nobody seeds
        part, _ = random_split(data, [20, 10])
        with session_on(group, tmp_path) as s:
            with pytest.raises(JobError) as error:
                s.loader(part, global_batch=8) if trains else s.eval_loader(part)
            s.loader(Subset(data, range(20)), global_batch=8)
        return str(error.value)

    (message,) = set(run_ranks(2, body))
    assert re.search("rank 1 on .* has samples in its Subset 20 samples, ", message)
    assert re.search(r"random_split.*generator=torch.Generator\(\).manual_seed\(0\)", message)


def test_a_stream_of_raw_images_cant_be_augmented_on_the_device() -> None:
    class RawStream(IterableDataset[tuple[Tensor, int]]):
        mean, std, scale = (0.5,), (0.5,), 255

        def __iter__(self) -> Iterator[tuple[Tensor, int]]:
            yield torch.zeros(1, 4, 4, dtype=torch.uint8), 0

    group = Group(Placement(), torch.device("cpu"), "none")
    config = TrainConfig.from_settings({})
    with pytest.raises(UsageError, match="put the transforms into the data set"):
        make_source(describe_data(RawStream()), config, group, False, augment=(RandomFlip(),))


def test_a_batch_sampler_settles_its_batches_alone(tmp_path: Path) -> None:
    def body(group: Group) -> None:
        with session_on(group, tmp_path) as s:
            with pytest.raises(
                UsageError, match="global_batch=4 beside a DataLoader with a batch_"
            ):
                s.loader(loader_of(Buckets()), global_batch=4)
            with pytest.raises(UsageError, match="batches can't be evaluated on"):
                s.eval_loader(loader_of(Buckets()))

    run_ranks(1, body)
