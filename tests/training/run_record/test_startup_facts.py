"""What workers compare before they connect."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.options.fields import OptionValue
from paceline.training.config import TrainConfig, TrainRequest
from paceline.training.run_record import startup_facts
from paceline.training.run_record.startup_facts import common_arguments, facts_of, source_file
from paceline.training.worker import facts_here

REQUEST = TrainRequest(
    recipe="digits",
    reference="paceline.recipes.digits:digits",
    arguments={"dropout": 0.1, "data": "/data/digits", "sizes": (1, 2), "note": None},
    settings={},
    given=(),
    run_dir="run",
    command=("paceline", "train"),
    started_at="2026-01-01T00:00:00+00:00",
)


def made(asked: TrainRequest = REQUEST, **settings: OptionValue) -> dict[str, str]:
    config = TrainConfig.from_settings(settings)
    return facts_of(asked, config.settings(), device="cpu", backend="gloo")


def test_settings_arguments_code_and_versions_are_facts() -> None:
    found = made(lr=0.02)
    assert (found["lr"], found["dropout"], found["sizes"]) == ("0.02", "0.1", "1 2")
    assert found["recipe"] == REQUEST.reference
    assert {"torch", "numpy", "torchvision", "Python", "Paceline"} <= found.keys()
    source = Path(startup_facts.__file__).parents[2] / "recipes" / "digits.py"
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    assert found["digits.py with SHA-256"] == digest[:12]


@pytest.mark.parametrize(
    "own",
    [
        {"rank": 0, "world_size": 2, "init_method": "tcp://a:1"},
        {"threads": 3, "workers": 2, "max_restarts": 0},
        {"interface": "eth0", "progress": "off", "loader_workers": 0},
    ],
    ids=str,
)
def test_what_belongs_to_one_node_is_no_fact(own: dict[str, OptionValue]) -> None:
    assert made(REQUEST, **own) == made()


def test_paths_may_differ() -> None:
    moved = replace(REQUEST, arguments={**REQUEST.arguments, "data": "/elsewhere"})
    assert made(moved) == made()
    assert made(replace(REQUEST, arguments={"dropout": 0.2})) != made()


def test_what_numbers_depend_on_is_added() -> None:
    found = facts_of(REQUEST, {}, device="cpu", backend="gloo", numerics={"threads": 2})
    assert found["threads"] == "2"


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        (["--lr", "0.1"], ["--lr", "0.1"]),
        (["--rank", "3", "--lr=1"], ["--lr=1"]),
        (["--local_rank=3", "--node-rank", "1", "-v"], ["-v"]),
        (["--rank", "-v"], ["-v"]),
        (["/a/b", "--data=x/y", "--init", "tcp://a:1"], ["PATH", "--data=PATH", "--init", "PATH"]),
    ],
    ids=str,
)
def test_arguments_of_a_script(arguments: list[str], kept: list[str]) -> None:
    assert common_arguments(arguments) == kept


def test_the_same_file_at_another_place_is_the_same_code(tmp_path: Path) -> None:
    found = []
    for name, text in (("a", "x = 1"), ("b", "x = 1"), ("c", "x = 2")):
        script = tmp_path / name / "train.py"
        script.parent.mkdir()
        script.write_text(text)
        found.append(made(replace(REQUEST, kind="script", reference=str(script))))
        assert source_file(f"{script}:build") == script
    assert found[0] == found[1]
    assert found[0] != found[2]


@pytest.mark.parametrize("reference", ["nowhere.py:f", "no_such_package.x:f", "session", "x:f"])
def test_code_that_isnt_in_a_file(reference: str) -> None:
    assert source_file(reference) is None


def test_a_package_is_found_without_importing_it() -> None:
    found = source_file("paceline.recipes:f")
    assert found is not None
    assert found.parts[-2:] == ("recipes", "__init__.py")


@pytest.mark.parametrize(
    ("settings", "method"),
    [({}, "allreduce"), ({"shards": 2}, "ordered"), ({"sync": "powersgd"}, "powersgd")],
)
def test_the_way_of_combining_gradients_is_what_it_comes_to(
    settings: dict[str, OptionValue], method: str
) -> None:
    config = TrainConfig.from_settings(
        {**settings, "allow_different_hardware": "shards" in settings}
    )
    assert facts_here(REQUEST, config, torch.device("cpu"), "gloo")["sync"] == method
