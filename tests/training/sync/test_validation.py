"""Which ways of combining gradients go with what."""

import pytest

from paceline.errors import UsageError
from paceline.gradient_sync.options import SyncMethod
from paceline.options.fields import OptionValue
from paceline.training.config import TrainConfig, merge
from paceline.training.sync.validation import (
    check_every,
    check_method,
    check_reproducible,
    describe_method,
    may_choose,
    method_of,
    refuse_backend,
)


def config(**given: OptionValue) -> TrainConfig:
    return TrainConfig.from_settings(given)


def test_the_default_follows_the_shards() -> None:
    assert method_of(config()) == "allreduce"
    assert method_of(config(shards=4)) == "ordered"
    assert method_of(config(sync="bf16")) == "bf16"


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"shards": 4},
        {"shards": 4, "sync": "ordered"},
        {"sync": "powersgd", "powersgd_rank": 2, "sync_warmup_steps": 5},
        {"sync": "local", "sync_every": 4, "sync_delay": 0, "sync_parts": 2},
        {"sync": "diloco", "outer_lr": 0.5, "outer_momentum": 0.0, "sync_precision": "int8"},
        {"sync": "powersgd", "backend": "mpi"},
        {"sync": "local", "backend": "mpi"},
        {"sync": "diloco", "check_every": 0},
        {"sync": "local", "balance": True},
        {"sync": "auto"},
    ],
    ids=str,
)
def test_what_goes_together(given: dict[str, OptionValue]) -> None:
    check_method(config(**given))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"shards": 4, "sync": "bf16"}, "--shards can't be combined with --sync bf16"),
        ({"shards": 4, "sync": "auto"}, "--shards can't be combined with --sync auto"),
        ({"sync": "ordered"}, "--sync ordered needs --shards V"),
        ({"powersgd_rank": 2}, "--powersgd-rank has no effect with --sync allreduce.* powersgd$"),
        ({"sync": "bf16", "sync_every": 4}, "--sync-every .* --sync local or diloco$"),
        ({"sync": "local", "outer_lr": 0.5}, "--outer-lr has no effect with --sync local"),
        ({"sync": "allreduce", "sync_warmup_steps": 0}, "--sync-warmup-steps has no effect"),
        ({"sync": "auto", "sync_every": 4}, "--sync-every has no effect with --sync auto"),
        ({"sync": "fp16", "backend": "mpi"}, "--backend mpi, which carries no half precision"),
        ({"sync": "local", "check_every": 5}, "--check-every compares .* with --sync local"),
        ({"sync": "diloco", "sync_batchnorm": True}, "--sync-batchnorm exchanges statistics"),
        (
            {"sync": "local", "sync_precision": "int8", "backend": "smddp"},
            "--sync-precision int8 can't be combined with --backend smddp, which has no all-to-all",
        ),
        ({"sync": "auto", "backend": "smddp"}, "--backend smddp, which carries no half"),
    ],
    ids=str,
)
def test_what_does_not(given: dict[str, OptionValue], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        check_method(config(**given))


def test_a_backend_that_was_found_is_refused_as_one_that_was_given() -> None:
    refuse_backend("bf16", "gloo")
    with pytest.raises(UsageError, match="--backend smddp"):
        refuse_backend("bf16", "smddp")


@pytest.mark.parametrize(
    ("given", "fitting"),
    [
        ({}, ["bf16", "powersgd", "local"]),
        ({"check_every": 5}, ["bf16", "powersgd"]),
        ({"sync_batchnorm": True}, ["bf16", "powersgd"]),
        ({"backend": "mpi"}, ["powersgd", "local"]),
        ({"shards": 4}, []),
    ],
    ids=str,
)
def test_what_auto_may_choose(given: dict[str, OptionValue], fitting: list[SyncMethod]) -> None:
    methods: tuple[SyncMethod, ...] = ("bf16", "powersgd", "local")
    asked = config(**given, sync="auto")
    assert [method for method in methods if may_choose(asked, method)] == fitting


def test_another_method_than_the_recipes_leaves_the_recipes_options_out() -> None:
    recipe: dict[str, OptionValue] = {"sync": "local", "sync_every": 4, "sync_warmup_steps": 9}
    assert merge({"sync": "bf16"}, recipe) == {"sync": "bf16"}
    assert merge({"sync": "powersgd"}, recipe) == {"sync": "powersgd", "sync_warmup_steps": 9}
    assert merge({"sync_every": 2}, recipe) == recipe | {"sync_every": 2}
    with pytest.raises(UsageError, match="--sync-every has no effect with --sync bf16"):
        check_method(config(**merge({"sync": "bf16", "sync_every": 2}, recipe)))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "allreduce"),
        ({"shards": 2}, "ordered"),
        ({"sync": "powersgd", "powersgd_rank": 2}, "powersgd of rank 2"),
        ({"sync": "local"}, "local, averaged every 8 steps in fp32, 4 steps late"),
        (
            {"sync": "diloco", "sync_parts": 2, "sync_precision": "int8"},
            "diloco, averaged every 8 steps in 2 parts in int8, 4 steps late, outer learning "
            "rate 0.7 and momentum 0.9",
        ),
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
