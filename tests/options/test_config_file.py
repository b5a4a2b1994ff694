import json
from pathlib import Path
from typing import Literal

import pytest

from paceline.errors import UsageError
from paceline.options.command_line import GivenOptions, read_options
from paceline.options.config_file import CONFIG, as_toml
from paceline.options.fields import OptionField, OptionValue
from paceline.training.config import TrainConfig


def _option(name: str, annotation: object, default: OptionValue) -> OptionField:
    return OptionField(name=name, annotation=annotation, default=default, help="It.", group="A")


_OPTIONS = (
    CONFIG,
    _option("epochs", int, 10),
    _option("lr", float, 0.1),
    _option("base_batch", int | None, 8),
    _option("schedule", Literal["none", "cosine"], "cosine"),
    _option("betas", tuple[float, float] | None, None),
    _option("volume", tuple[str, ...], ()),
    _option("compile", bool, False),
    _option("time_budget", None | str, None),
)


def _read(text: str, *tokens: str, name: str = "job.toml") -> GivenOptions:
    Path(name).write_text(text)
    return read_options("paceline x", "", [*tokens, "--config", name], _OPTIONS)


@pytest.fixture(autouse=True)
def _in_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_values_of_each_type() -> None:
    found = _read(
        """
        epochs = 3
        "lr" = 1
        base_batch = "none"
        schedule = "none"
        betas = [0.9, 0.99]
        volume = ["a:/b", "c:/d"]
        compile = true
        time-budget = "2h"
        """
    )
    assert found.values == {
        "config": "job.toml",
        "epochs": 3,
        "lr": 1.0,
        "base_batch": None,
        "schedule": "none",
        "betas": (0.9, 0.99),
        "volume": ("a:/b", "c:/d"),
        "compile": True,
        "time_budget": "2h",
    }
    assert type(found.values["epochs"]) is int
    assert found.sources["lr"] == "job.toml:3"


def test_the_command_line_counts_before_the_environment_before_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PACELINE_EPOCHS", "4")
    monkeypatch.setenv("PACELINE_LR", "0.4")
    found = _read("epochs = 3\nlr = 0.3\nbase-batch = 3\n", "--lr", "0.5")
    assert (found.values["lr"], found.values["epochs"], found.values["base_batch"]) == (0.5, 4, 3)
    assert found.sources["lr"] == "command line"
    assert found.sources["epochs"] == "environment"
    assert found.sources["base_batch"] == "job.toml:3"


def test_where_a_refused_option_stands_is_said_unless_it_was_typed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PACELINE_BASE_BATCH", "0")
    found = _read("\nepochs = -3\n", "--lr", "-1")
    for name, place in (("epochs", "job.toml:2: --"), ("base_batch", "PACELINE_BASE_BATCH: --")):
        with pytest.raises(UsageError, match=f"^{place}{name.replace('_', '-')} "), found.placed():
            TrainConfig.from_settings({name: found.values[name]})
    with pytest.raises(UsageError, match=r"^--lr is -1"), found.placed():
        TrainConfig.from_settings({"lr": found.values["lr"]})


def test_a_time_without_its_unit_is_read_as_on_a_command_line() -> None:
    assert _read("time-budget = 90\n").values["time_budget"] == "90"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\nepoch = 3", r"^job.toml:2: unknown setting 'epoch'. Did you mean 'epochs'\? Known: "),
        ("lr = 1\n\nepochs = 1.5", r"^job.toml:3: epochs is 1.5; it should be a whole number$"),
        ("epochs = '3'", r"^job.toml:1: epochs is text \('3'\); it should be a whole number$"),
        ("compile = 1", r"^job.toml:1: compile is 1; it should be true or false$"),
        ("lr = true", r"^job.toml:1: lr is true; it should be a number$"),
        ("time-budget = true", r"^job.toml:1: time-budget is true; it should be text$"),
        ("time-budget = [90]", r"^job.toml:1: time-budget is a list; it should be text$"),
        ("betas = [1]", r"^job.toml:1: betas is a list; it should be a list of 2 numbers$"),
        (
            "schedule = 'line'",
            r"job.toml:1: schedule is text \('line'\); it should be one of none, c",
        ),
        ("base-batch = 1\nbase_batch = 1", r"^job.toml:2: base_batch is given before: job.toml:1$"),
        ("\n[train]\nlr = 1", r"^job.toml:2: \[train\] is a table; settings stand alone"),
        ("config = 'a'", r"^job.toml:1: unknown setting 'config'"),
        ("lr = 1\nlr == 2", r"--config job.toml isn't TOML: .*line 2"),
        ("lr = nan", r"^job.toml:1: --lr is nan: give a finite number"),
        ("recipe = 3", r"^job.toml:1: recipe is 3, not text$"),
        ("{", r"--config job.toml can't be read: "),
        ("{}", r"it is JSON, but no run.json"),
    ],
)
@pytest.mark.core_cases(16)
def test_what_is_wrong_is_said_with_its_line(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _read(text)


def test_a_file_that_cant_be_read() -> None:
    with pytest.raises(UsageError, match=r"--config nowhere.toml can't be read: No such file"):
        read_options("paceline x", "", ["--config=nowhere.toml"], _OPTIONS)
    Path("latin.toml").write_bytes(b"epochs = 3 # \xe9")
    with pytest.raises(UsageError, match=r"it isn't UTF-8 \(byte 13\)"):
        read_options("paceline x", "", ["--config=latin.toml"], _OPTIONS)


def test_of_a_run_what_differs_from_the_defaults() -> None:
    settings = {"epochs": 10, "lr": 0.2, "betas": [0.9, 0.99], "base_batch": None, "workers": 4}
    content = {"recipe": "a.py:b", "settings": settings, "recipe_arguments": {"compile": True}}
    found = _read(json.dumps(content, indent=2), name="run.json")
    del found.values["config"]
    assert found.values == {
        "lr": 0.2,
        "betas": (0.9, 0.99),
        "base_batch": None,
        "compile": True,
    }


@pytest.mark.parametrize(
    "value", [3, 0.25, 1e-7, True, None, 'a "b" \\ c\n\t# é', (0.9, 0.5), ("a", "b")]
)
def test_what_is_written_is_read_again(value: OptionValue) -> None:
    import tomllib

    line = as_toml("some_name", value)
    read = tomllib.loads(line)["some-name"]
    assert (tuple(read) if isinstance(read, list) else read) == ("none" if value is None else value)
