"""What `--shards` can't be combined with."""

import pytest

from paceline.errors import UsageError
from paceline.options.fields import OptionValue
from paceline.training.config import TrainConfig
from paceline.training.sync.shard_validation import check_every, check_reproducible


def config(**given: OptionValue) -> TrainConfig:
    return TrainConfig.from_settings(given)


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ({"sync_batchnorm": True}, "GroupNorm"),
        ({"time_budget": "2h"}, "--epochs"),
        ({"backend": "smddp"}, "--backend nccl or gloo"),
        ({"backend": "mpi"}, "--backend nccl or gloo"),
    ],
    ids=str,
)
def test_what_is_refused_with_shards_alone(given: dict[str, OptionValue], advice: str) -> None:
    with pytest.raises(UsageError, match=f"--shards .*{advice}"):
        check_reproducible(config(shards=4, **given), 2)
    check_reproducible(config(**given), 2)


def test_more_workers_than_shards() -> None:
    check_reproducible(config(shards=4), 4)
    with pytest.raises(UsageError, match=r"5 workers are more than --shards 4.*at most 4"):
        check_reproducible(config(shards=4), 5)


@pytest.mark.parametrize(
    ("given", "steps"),
    [({}, 0), ({"shards": 4}, 100), ({"shards": 4, "check_every": 0}, 0), ({"check_every": 7}, 7)],
    ids=str,
)
def test_how_often_weights_are_compared(given: dict[str, OptionValue], steps: int) -> None:
    assert check_every(config(**given)) == steps


def test_a_negative_number_of_steps_is_refused() -> None:
    with pytest.raises(UsageError, match="--check-every must be at least 0, not -1"):
        config(check_every=-1)
