import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import DataError
from paceline.results.profile import (
    Arrival,
    EpochCosts,
    Spread,
    StepParts,
    StepProfile,
    WorkerTime,
)

PROFILE = StepProfile(
    world_size=2,
    nodes=1,
    sync="allreduce",
    device="cpu",
    global_batch=64,
    steps_per_epoch=23,
    steps_seen=7,
    step_s=Spread(median=0.1, low=0.09, high=0.2),
    images_per_s=640.0,
    parts=StepParts(
        data=0.01,
        forward=0.02,
        backward=0.04,
        exposed=0.01,
        waiting=0.005,
        optimizer=0.01,
        other=0.005,
    ),
    workers=(
        WorkerTime(rank=0, host="one", compute_s=0.08, spread_s=0.001),
        WorkerTime(rank=1, host="two", compute_s=0.09, spread_s=0.002),
    ),
    gradients=(Arrival(at_s=0.01, bytes=400), Arrival(at_s=0.03, bytes=1200)),
    gradient_bytes=1600,
    parameter_bytes=2000,
    wire_bytes_per_step=1600.0,
    epoch=EpochCosts(evaluation_s=0.5, loader_start_s=0.01),
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(PROFILE.to_json())
    assert StepProfile.read(path) == PROFILE


def test_fields_of_a_later_version_are_passed_over() -> None:
    told = {**json.loads(PROFILE.to_json()), "moons": 2}
    assert StepProfile.from_json(json.dumps(told)) == PROFILE


def _without_steps(told: dict[str, Any]) -> None:
    del told["step_s"]


def _without_a_part(told: dict[str, Any]) -> None:
    del told["parts"]["waiting"]


def _with_a_strange_part(told: dict[str, Any]) -> None:
    told["parts"]["waving"] = 1.0


def _with_a_part_too_plain(told: dict[str, Any]) -> None:
    told["step_s"] = 0.1


def _with_a_list_too_plain(told: dict[str, Any]) -> None:
    told["workers"] = 2


def _with_strange_members(told: dict[str, Any]) -> None:
    told["gradients"] = [1, 2]


@pytest.mark.parametrize(
    "damage",
    [
        _without_steps,
        _without_a_part,
        _with_a_strange_part,
        _with_a_part_too_plain,
        _with_a_list_too_plain,
        _with_strange_members,
    ],
)
def test_something_else_is_refused_by_name(
    damage: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    told = json.loads(PROFILE.to_json())
    damage(told)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(told))
    with pytest.raises(DataError, match=r"profile\.json: the text isn't"):
        StepProfile.read(path)


@pytest.mark.parametrize("text", ["", "[]", "null", "3", '{"format": 1', "\0"])
def test_a_damaged_file_is_refused_by_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"profile\.json: the text isn't a profile"):
        StepProfile.read(path)


def test_bytes_that_are_no_text_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(DataError, match=r"profile\.json"):
        StepProfile.read(path)


def test_another_format_is_refused() -> None:
    told = {**json.loads(PROFILE.to_json()), "format": 2}
    with pytest.raises(DataError, match="format 2; this Paceline reads 1"):
        StepProfile.from_json(json.dumps(told))


def test_no_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"can't read .*profile\.json: No such file"):
        StepProfile.read(tmp_path / "profile.json")
