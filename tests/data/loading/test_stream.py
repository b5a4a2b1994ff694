from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from paceline.data.batch import Batch
from paceline.data.loading.stream import StreamSource
from paceline.data.order import EpochPlan
from paceline.distributed.group import Group
from paceline.errors import DataError
from tests.support.ranks import RankError, run_ranks

SAMPLES, BATCH = 20, 6


class Numbers(IterableDataset[object]):
    """0.0, 1.0 … plus 100 an epoch."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self._samples, self._epoch = samples, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[object]:
        return ({"x": torch.tensor(100.0 * self._epoch + i)} for i in range(self._samples))


def plan(group: Group, first_step: int = 0, *, drop_last: bool = False) -> EpochPlan:
    return EpochPlan(
        seed=0,
        epoch=1,
        global_batch=BATCH,
        first_step=first_step,
        part=group.rank,
        parts=group.world_size,
        drop_last=drop_last,
    )


def values(batch: Batch) -> list[float]:
    assert isinstance(batch.content, dict)
    x: Tensor = batch.content["x"]
    assert len(x) == max(1, batch.local)  # one sample stands in where there is none
    return x.tolist()[: batch.local]


def read(group: Group, first_step: int, drop_last: bool) -> list[list[float]]:
    source = StreamSource(Numbers(), group)
    batches = source.train_batches(plan(group, first_step, drop_last=drop_last))
    return [values(batch) for batch in batches]


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("first_step", [0, 2])
@pytest.mark.core_cases(5)
def test_the_order_is_that_of_one_process(
    world_size: int, drop_last: bool, first_step: int
) -> None:
    shares = run_ranks(world_size, read, first_step, drop_last)
    steps = [[x for share in step for x in share] for step in zip(*shares, strict=True)]
    stop = SAMPLES - SAMPLES % BATCH if drop_last else SAMPLES
    expected = [
        [100.0 + i for i in range(start, min(start + BATCH, stop))]
        for start in range(first_step * BATCH, stop, BATCH)
    ]
    assert steps == expected


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_epoch_that_is_over_can_be_gone_on_with(world_size: int) -> None:
    """The last of its four steps was a short one: 20 samples, not 24."""
    assert run_ranks(world_size, read, 4, False) == [[]] * world_size


@pytest.mark.ranks
def test_a_stream_that_has_become_shorter_is_an_error() -> None:
    with pytest.raises(RankError, match="ended after 20 samples, before the step 5"):
        run_ranks(2, read, 5, False)


@pytest.mark.ranks
@pytest.mark.parametrize("samples", [SAMPLES - 1, 2 * BATCH])
def test_streams_of_different_lengths_are_an_error_on_all(samples: int) -> None:
    def body(group: Group) -> str:
        source = StreamSource(Numbers(SAMPLES if group.rank else samples), group)
        with pytest.raises(DataError) as caught:
            list(source.train_batches(plan(group)))
        return str(caught.value)

    for message in run_ranks(3, body):
        assert "the workers read different samples (rank 0 has" in message
        assert "leave the sharding to Paceline" in message


@pytest.mark.ranks
def test_streams_of_the_same_length_with_other_samples_are_an_error_on_all() -> None:
    def body(group: Group) -> str:
        numbers = Numbers()
        numbers.set_epoch = lambda epoch: None  # type: ignore[method-assign]
        numbers._epoch = group.rank  # as where each rank seeds its own shuffling
        with pytest.raises(DataError) as caught:
            list(StreamSource(numbers, group).train_batches(plan(group)))
        return str(caught.value)

    for message in run_ranks(2, body):
        assert "from sample 0 on the workers read different samples" in message


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_evaluation_reads_each_sample_once(world_size: int) -> None:
    def body(group: Group) -> list[float]:
        source = StreamSource(Numbers(), group)
        assert source.num_samples == 0
        batches = source.eval_batches(group.rank, group.world_size, BATCH)
        return [x for batch in batches for x in values(batch)]

    found = run_ranks(world_size, body)
    assert sorted(x for share in found for x in share) == [float(i) for i in range(SAMPLES)]
