import json
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.options.fields import OptionValue, flag
from paceline.results.run_directory import RunDirectory
from paceline.training.config import TrainConfig
from paceline.training.run_record.previous_run import FIXED, FREE, PreviousRun
from paceline.training.sync.validation import check_method


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    settings = TrainConfig.from_settings({"optimizer": "adam", "betas": (0.8, 0.9)}).settings()
    content = {
        "kind": "recipe",
        "script_args": [],
        "recipe": "digits",
        "reference": "paceline.recipes.digits:digits",
        "recipe_arguments": {"dropout": 0.1},
        "settings": settings | {"betas": [0.8, 0.9], "batch_per_worker": 16},
        "given": ["optimizer", "betas", "batch_per_worker"],
        "derived": {"global_batch": 32, "world_size": 2, "steps_per_epoch": 10},
        "started_at": "2026-01-01T00:00:00+00:00",
    }
    run = RunDirectory(tmp_path)
    run.run_json.write_text(json.dumps(content))
    return run


def test_where_and_how_it_was_shown_belong_to_one_start(run: RunDirectory) -> None:
    content = run.read_run()
    run.run_json.write_text(json.dumps(content | {"given": ["optimizer", "dropout", "workers"]}))
    past = PreviousRun.read(run)
    assert not past.settings.keys() & {"workers", "on", "progress"}
    assert past.given == ("optimizer", "dropout")


def test_the_global_batch_is_kept_on_any_number_of_workers(run: RunDirectory) -> None:
    config = PreviousRun.read(run).config()
    assert (config.data.global_batch, config.data.batch_per_worker) == (32, None)
    assert PreviousRun.read(run).world_size == 2
    assert config.optim.betas == (0.8, 0.9)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"workers": 3, "snapshot_every_steps": 5, "progress": "plain", "threads": 1},
        {"lr": 0.1},  # as it was
        {"dropout": 0.1},
        {"max_batch_per_worker": 2, "loader_workers": 0},
    ],
    ids=str,
)
def test_what_doesnt_change_the_training_is_taken(
    given: dict[str, OptionValue], run: RunDirectory
) -> None:
    past = PreviousRun.read(run)
    settings, arguments = past.changed(given, [])
    assert {**settings, **arguments}.items() >= given.items()
    assert settings.keys() == past.settings.keys() | given.keys() - arguments.keys()
    assert arguments == past.arguments


def test_what_changes_the_training_is_refused_and_all_of_it_shown(run: RunDirectory) -> None:
    with pytest.raises(UsageError) as error:
        PreviousRun.read(run).changed({"lr": 0.2, "epochs": 20, "dropout": 0.3, "seed": 1}, ["lr"])
    text = str(error.value)
    assert "lr:" not in text
    assert "epochs: the run has 10, you give 20" in text
    assert "dropout: the run has 0.1, you give 0.3" in text
    assert "seed can't change within a training" in text
    assert "--allow-change epochs --allow-change dropout" in text


def test_more_epochs_are_free_once_all_are_trained(run: RunDirectory) -> None:
    past = replace(PreviousRun.read(run), is_complete=True)
    assert past.changed({"epochs": 20}, [])[0]["epochs"] == 20
    with pytest.raises(UsageError, match="epochs: the run has 10, you give 9"):
        past.changed({"epochs": 9}, [])


def test_allowed_changes_are_taken(run: RunDirectory) -> None:
    settings, arguments = PreviousRun.read(run).changed(
        {"epochs": 20, "dropout": 0.3}, ["epochs", "dropout"]
    )
    assert (settings["epochs"], arguments["dropout"]) == (20, 0.3)


@pytest.mark.parametrize("name", sorted(FIXED))
def test_what_can_never_change(name: str, run: RunDirectory) -> None:
    values: dict[str, OptionValue] = {"drop_last": True, "optimizer": "sgd"}
    value = values.get(name, 7)
    with pytest.raises(
        UsageError, match=f"{flag(name)} can't change .*, since .*: start a new one"
    ):
        PreviousRun.read(run).changed({name: value}, [name])


def test_an_argument_of_the_recipe_can_be_allowed_without_a_change(run: RunDirectory) -> None:
    assert PreviousRun.read(run).changed({}, ["dropout"])[1] == {"dropout": 0.1}


@pytest.mark.parametrize(
    ("epochs", "step", "told"),
    [(2, 20, None), (3, 21, None), (1, 20, "epoch 2 is trained already, and"), (2, 21, "1 steps")],
)
def test_fewer_epochs_than_are_done(
    epochs: int, step: int, told: str | None, run: RunDirectory
) -> None:
    past = PreviousRun.read(run)
    if told is None:
        past.check_epochs(epochs, step)
        return
    with pytest.raises(UsageError, match=f"--epochs is {epochs}, but .*{told}.*Give at least"):
        past.check_epochs(epochs, step)


def test_an_unknown_name_to_allow_lists_the_known(run: RunDirectory) -> None:
    with pytest.raises(UsageError, match=r"'epoch'\. Did you mean 'epochs'\? .*--help-all"):
        PreviousRun.read(run).changed({}, ["epoch"])
    with pytest.raises(UsageError, match=r"'target-acuracy'\. Did you mean 'target-accuracy'\?"):
        PreviousRun.read(run).changed({}, ["target_acuracy"])
    with pytest.raises(UsageError, match=r"all the same: --allow-change label-smoothing$"):
        PreviousRun.read(run).changed({"label_smoothing": 0.3}, [])
    with pytest.raises(UsageError, match=r"(?s)--patience: .*--allow-change patience$"):
        PreviousRun.read(run).changed({"patience": 30}, [])


def test_free_options_are_options() -> None:
    assert TrainConfig().settings().keys() >= FREE | FIXED.keys()
    assert not FREE & FIXED.keys()


@pytest.mark.parametrize("missing", ["settings", "derived", "recipe", "given"])
def test_a_run_json_of_another_kind(missing: str, run: RunDirectory) -> None:
    content = run.read_run()
    del content[missing]
    run.run_json.write_text(json.dumps(content))
    with pytest.raises(UsageError, match=r"wasn't written by this version"):
        PreviousRun.read(run)


@pytest.fixture
def sharded(run: RunDirectory) -> PreviousRun:
    """A training in reproducible mode."""
    content = run.read_run()
    settings = content["settings"]
    assert isinstance(settings, dict)
    run.run_json.write_text(json.dumps(content | {"settings": settings | {"shards": 4}}))
    return PreviousRun.read(run)


@pytest.mark.parametrize("name", ["threads", "max_batch_per_worker"])
def test_with_shards_what_bits_depend_on_stays(name: str, sharded: PreviousRun) -> None:
    with pytest.raises(
        UsageError, match=f"bits depend on {flag(name)}: .*--allow-different-hardware"
    ):
        sharded.changed({name: 2}, [name])
    knowingly: dict[str, OptionValue] = {name: 2, "allow_different_hardware": True}
    settings, _ = sharded.changed(knowingly, [])
    assert settings.items() >= knowingly.items()


def test_the_default_number_of_threads_may_be_given(sharded: PreviousRun) -> None:
    assert sharded.settings["threads"] is None
    assert sharded.changed({"threads": 1}, [])[0]["threads"] == 1
    given = replace(sharded, settings={**sharded.settings, "threads": 1})
    assert given.changed({"threads": None}, [])[0]["threads"] is None
    with pytest.raises(UsageError, match="threads"):
        given.changed({"threads": 2}, [])


def test_what_was_allowed_once_is_remembered(sharded: PreviousRun) -> None:
    settings, _ = sharded.changed({"allow_different_hardware": True}, [])
    again = replace(sharded, settings=settings)
    assert again.changed({"threads": 2}, [])[0]["threads"] == 2


def test_reproducible_mode_can_be_neither_entered_nor_left(
    run: RunDirectory, sharded: PreviousRun
) -> None:
    assert sharded.changed({"shards": 4}, [])[0]["shards"] == 4
    for value in (None, 8):
        with pytest.raises(UsageError, match="shards can't change within a training"):
            sharded.changed({"shards": value}, ["shards"])


def test_the_way_of_combining_gradients_may_change(run: RunDirectory) -> None:
    past = PreviousRun.read(run)
    assert past.changed({"sync": "powersgd"}, [])[0]["sync"] == "powersgd"
    content = json.loads(run.run_json.read_text())
    content["settings"] |= {"sync": "allreduce", "sync_precision": "bf16"}
    run.run_json.write_text(json.dumps(content))
    settings, _ = PreviousRun.read(run).changed({"sync": "powersgd", "powersgd_rank": 2}, [])
    check_method(TrainConfig.from_settings(settings))  # nothing of the other method is left
    whole, _ = PreviousRun.read(run).changed({"sync_precision": "fp32"}, [])
    assert whole["sync_precision"] == "fp32"
