"""Which ways of combining gradients go with what."""

import pytest

from paceline.errors import UsageError
from paceline.gradient_sync.options import SyncOptions
from paceline.options.fields import OptionValue
from paceline.training.config import TrainConfig, merge
from paceline.training.sync.validation import (
    check_every,
    check_method,
    check_reproducible,
    describe_method,
    method_of,
    refuse_backend,
)


def config(**given: OptionValue) -> TrainConfig:
    return TrainConfig.from_settings(given)


def test_the_default_follows_the_shards() -> None:
    assert method_of(config()) == "allreduce"
    assert method_of(config(shards=4)) == "ordered"
    assert method_of(config(sync="powersgd")) == "powersgd"


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"shards": 4},
        {"shards": 4, "sync": "ordered"},
        {"sync": "powersgd", "powersgd_rank": 2, "sync_warmup_steps": 5},
        {"sync_precision": "bf16"},
        {"sync": "allreduce", "sync_precision": "bf16"},
        {"sync": "powersgd", "backend": "mpi"},
    ],
    ids=str,
)
def test_what_goes_together(given: dict[str, OptionValue]) -> None:
    check_method(config(**given))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"shards": 4, "sync": "powersgd"}, "--shards can't be combined with --sync powersgd"),
        ({"shards": 4, "sync_precision": "bf16"}, "--sync-precision has no effect .* ordered"),
        ({"sync": "ordered"}, "--sync ordered needs --shards V"),
        ({"powersgd_rank": 2}, "--powersgd-rank has no effect with --sync allreduce.* powersgd$"),
        (
            {"sync": "powersgd", "sync_precision": "bf16"},
            "--sync-precision has no effect with --sync powersgd: .* --sync allreduce$",
        ),
        ({"sync": "allreduce", "sync_warmup_steps": 0}, "--sync-warmup-steps has no effect"),
        ({"sync_precision": "bf16", "backend": "mpi"}, "--backend mpi, which carries no half"),
    ],
    ids=str,
)
def test_what_does_not(given: dict[str, OptionValue], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        check_method(config(**given))


def test_a_backend_that_was_found_is_refused_as_one_that_was_given() -> None:
    half = SyncOptions(sync_precision="bf16")
    refuse_backend(half, "gloo")
    with pytest.raises(UsageError, match="--backend smddp"):
        refuse_backend(half, "smddp")


def test_another_method_than_the_recipes_leaves_the_recipes_options_out() -> None:
    recipe: dict[str, OptionValue] = {"sync": "powersgd", "powersgd_rank": 2}
    assert merge({"sync": "allreduce"}, recipe) == {"sync": "allreduce"}
    assert merge({"powersgd_rank": 3}, recipe) == recipe | {"powersgd_rank": 3}
    with pytest.raises(UsageError, match="--powersgd-rank has no effect with --sync allreduce"):
        check_method(config(**merge({"sync": "allreduce", "powersgd_rank": 2}, recipe)))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "allreduce"),
        ({"shards": 2}, "ordered"),
        ({"sync": "powersgd", "powersgd_rank": 2}, "powersgd of rank 2"),
        ({"sync_precision": "bf16"}, "allreduce in bf16"),
    ],
    ids=str,
)
def test_how_it_is_described(given: dict[str, OptionValue], text: str) -> None:
    assert describe_method(config(**given)) == text


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ({"sync_batchnorm": True}, "GroupNorm"),
        ({"time_budget": "2h"}, "--epochs"),
        ({"cudnn_benchmark": True}, "--cudnn-benchmark"),
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
