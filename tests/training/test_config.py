import pytest

from paceline.errors import UsageError
from paceline.launch.restart_policy import Policy, StopGrace
from paceline.options.fields import OptionValue
from paceline.recipes.registry import BUILT_IN
from paceline.training.config import TrainConfig, merge, training_options
from paceline.training.recipe import load_recipe

DIGITS = load_recipe(BUILT_IN["digits"]).settings


def test_settings_and_back() -> None:
    given: dict[str, OptionValue] = {
        "epochs": 3,
        "optimizer": "adamw",
        "betas": (0.8, 0.9),
        "global_batch": 12,
        "time_budget": "2h",
    }
    config = TrainConfig.from_settings(given)
    assert config.optim.betas == (0.8, 0.9)
    settings = config.settings()
    assert {name: settings[name] for name in given} == given
    assert settings.keys() == training_options().keys()
    assert TrainConfig.from_settings(settings) == config


def test_lists_from_json_become_tuples() -> None:
    config = TrainConfig.from_settings({"optimizer": "adam", "betas": [0.8, 0.9]})  # type: ignore[dict-item]
    assert config.optim.betas == (0.8, 0.9)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"unknown option 'epoch'\. Did you mean 'epochs'\?") as e:
        TrainConfig.from_settings({"epoch": 3})
    assert "global_batch" in str(e.value)


def test_a_value_of_the_wrong_type_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="epochs is 'three'; it should be int"):
        TrainConfig.from_settings({"epochs": "three"})


@pytest.mark.parametrize(
    ("given", "gone", "stays"),
    [
        ({}, [], ["momentum", "nesterov", "schedule", "global_batch"]),
        ({"optimizer": "adamw"}, ["momentum", "nesterov"], ["weight_decay", "lr", "schedule"]),
        ({"optimizer": "sgd"}, [], ["momentum", "nesterov"]),
        ({"optimizer": "lars"}, [], ["momentum", "nesterov"]),
        ({"batch_per_worker": 8}, ["global_batch"], ["batch_per_worker"]),
        ({"warmup_steps": 5}, ["warmup_epochs"], ["warmup_steps"]),
        ({"schedule": "one-cycle"}, ["warmup_epochs"], ["schedule"]),
        ({"schedule": "constant"}, [], ["warmup_epochs"]),
        ({"target_accuracy": None}, [], ["target_accuracy"]),
    ],
    ids=str,
)
def test_options_put_over_a_recipes(
    given: dict[str, OptionValue], gone: list[str], stays: list[str]
) -> None:
    merged = merge(given, DIGITS)
    assert all(name not in merged for name in gone)
    assert all(name in merged for name in stays)
    assert {name: merged[name] for name in given} == given
    TrainConfig.from_settings(merged)


def test_a_schedules_own_settings_go_with_it() -> None:
    recipe: dict[str, OptionValue] = {"schedule": "step", "step_epochs": 3, "step_factor": 0.5}
    assert merge({"schedule": "cosine"}, recipe) == {"schedule": "cosine"}
    assert merge({"lr": 1.0}, recipe) == recipe | {"lr": 1.0}


def test_an_unknown_optimizer_lists_the_known() -> None:
    with pytest.raises(UsageError, match="optimizer is 'sdg'; it should be one of sgd, adam"):
        TrainConfig.from_settings(merge({"optimizer": "sdg"}, DIGITS))
    with pytest.raises(UsageError, match=r"sync is 'auto'; it should be one of .*powersgd or None"):
        TrainConfig.from_settings({"sync": "auto"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, "--epochs must be at least 1, not 0"),
        ({"patience": 0}, "--patience"),
        ({"early_stopping": 0}, "--early-stopping"),
        ({"target_accuracy": 97.5}, "between 0 and 1, not 97.5"),
        ({"target_accuracy": 0.0}, "between 0 and 1"),
        ({"label_smoothing": 1.0}, "--label-smoothing"),
        ({"time_budget": "soon"}, "--time-budget is 'soon', not a duration"),
        ({"seed": -1}, "--seed"),
        ({"timeout_s": 0.0}, "--timeout-s"),
        ({"backend": "nccl", "device": "cpu"}, "--backend nccl needs GPUs"),
    ],
    ids=str,
)
def test_values_out_of_range(settings: dict[str, OptionValue], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TrainConfig.from_settings(settings)


def test_the_policy_of_a_launch_has_what_was_given() -> None:
    usual = TrainConfig().policy()
    assert (usual.max_restarts, usual.stop) == (3, StopGrace(least_s=3.5, most_s=120.0))
    given = TrainConfig.from_settings(
        {"max_restarts": 1, "stop_grace_s": 20.0, "hang_after_s": 0.0}
    )
    assert given.policy() == Policy(max_restarts=1, stop=StopGrace(least_s=20.0, most_s=20.0))
    assert TrainConfig().stop_grace(least_s=60.0) == StopGrace(least_s=60.0, most_s=120.0)


@pytest.mark.parametrize(
    ("settings", "least_s"),
    [({}, 30.0), ({"compile": True}, 120.0), ({"hang_after_s": 7.0, "compile": True}, 7.0)],
)
def test_workers_are_looked_after_unless_said_otherwise(
    settings: dict[str, OptionValue], least_s: float
) -> None:
    limits = TrainConfig.from_settings({"timeout_s": 50.0, **settings}).hang_limits()
    assert limits is not None
    assert (limits.least_s, limits.timeout_s) == (least_s, 50.0)
