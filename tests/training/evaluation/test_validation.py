from collections.abc import Generator

import pytest
import torch
from torch import Tensor, nn

from paceline.data.batch import Batch
from paceline.data.memory import MemorySource
from paceline.training.evaluation.validation import eval_mode, time_batches
from tests.support.trainings import pictures


def test_evaluation_mode_ends_with_the_evaluation() -> None:
    net = nn.Dropout()
    with eval_mode(net):
        assert not net.training
    assert net.training


def test_the_mode_comes_back_after_an_error() -> None:
    net = nn.Dropout()

    def fail() -> None:
        with eval_mode(net):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert net.training


def test_a_part_that_the_user_has_frozen_stays_so() -> None:
    net = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout())
    net[0].eval()
    with eval_mode(net):
        assert [part.training for part in net] == [False, False]
    assert [part.training for part in net] == [False, True]


class Ticking:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize(
    ("most_s", "read", "sample_s"),
    [
        (0.0, [4, 4], 1.0 / 4),  # the first warms up, and says nothing of the others
        (10.5, [4, 4, 4], 2.0 / 8),
        (60.0, [4, 4, 4, 1], 3.0 / 9),
    ],
)
def test_the_first_batches_of_an_evaluation_are_timed(
    most_s: float, read: list[int], sample_s: float
) -> None:
    clock, seen = Ticking(), list[int]()
    ended = []

    def batches() -> Generator[Batch]:
        try:
            yield from MemorySource(pictures(13)).eval_batches(0, 1, 4)
        finally:
            ended.append(True)

    def judge(content: object) -> dict[str, Tensor]:
        assert isinstance(content, tuple)
        clock.now_s += 1.0 if seen else 9.0
        seen.append(len(content[1]))
        return {"loss": torch.zeros(())}

    assert time_batches(judge, batches(), most_s, clock) == pytest.approx(sample_s)
    assert seen == read
    assert ended, "the pass is ended at once: another one begins later"


def test_of_few_samples_to_evaluate_what_there_is_counts() -> None:
    def none() -> Generator[Batch]:
        yield from ()

    assert time_batches(lambda _: {}, none(), 1.0) == 0.0
    clock = Ticking()

    def judge(_: object) -> dict[str, Tensor]:
        clock.now_s += 9.0
        return {}

    def one() -> Generator[Batch]:
        yield from MemorySource(pictures(3)).eval_batches(0, 1, 4)

    assert time_batches(judge, one(), 0.0, clock) == pytest.approx(9.0 / 3)
