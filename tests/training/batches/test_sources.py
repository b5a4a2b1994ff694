"""What a script hands over as data, and what becomes of it."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from paceline.data.augment import RandomFlip
from paceline.data.memory import synthetic_images
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


REFUSED: dict[str, Callable[[], DataLoader[object]]] = {
    "WeightedRandomSampler": lambda: DataLoader(
        TensorDataset(*points()), batch_size=8, sampler=WeightedRandomSampler([1.0] * 50, 50)
    ),
    "no batch_size": lambda: DataLoader(TensorDataset(*points()), batch_size=None),
}


@pytest.mark.parametrize("what", REFUSED)
def test_orders_that_cannot_be_shared_are_refused(what: str, tmp_path: Path) -> None:
    def body(group: Group) -> str:
        with session_on(group, tmp_path) as s, pytest.raises(UsageError) as caught:
            s.loader(REFUSED[what]())
        return str(caught.value)

    assert what in run_ranks(1, body)[0]


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


def test_a_stream_of_raw_images_cant_be_augmented_on_the_device() -> None:
    class RawStream(IterableDataset[tuple[Tensor, int]]):
        mean, std, scale = (0.5,), (0.5,), 255

        def __iter__(self) -> Iterator[tuple[Tensor, int]]:
            yield torch.zeros(1, 4, 4, dtype=torch.uint8), 0

    group = Group(Placement(), torch.device("cpu"), "none")
    config = TrainConfig.from_settings({})
    with pytest.raises(UsageError, match="put the transforms into the data set"):
        make_source(describe_data(RawStream()), config, group, False, augment=(RandomFlip(),))
