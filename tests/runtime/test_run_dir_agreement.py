"""One process makes a training's run directory, under a name that no other training has."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.results.run_directory import RunDirectory
from paceline.runtime.run_dir_agreement import find_run, make_run
from paceline.runtime.spec import Launch, Place
from paceline.training.config import TrainConfig, TrainRequest

REQUEST = TrainRequest(
    recipe="digits",
    reference="paceline.recipes.digits:digits",
    arguments={},
    settings={},
    given=(),
    run_dir="",
    command=("paceline", "train"),
    started_at="2026-03-02T09:15:00+00:00",
)


def launch(path: Path, *, is_named: bool = False, attempt: int = 0, workers: int = 1) -> Launch:
    run = RunDirectory.named(path)
    return Launch(
        request=replace(REQUEST, run_dir=str(path)),
        config=TrainConfig(),
        run=run,
        place=Place(here=workers > 1, workers=workers, attempt=attempt),
        is_new=True,
        is_named=is_named,
    )


def test_two_trainings_of_one_second_have_directories_of_their_own(tmp_path: Path) -> None:
    made = [make_run(launch(tmp_path / "runs" / "digits")) for _ in range(2)]
    assert [one.run.path.name for one in made] == ["digits", "digits-2"]
    assert [one.request.run_dir for one in made] == [str(one.run.path) for one in made]
    assert all(one.run.logs.is_dir() for one in made)


def test_a_directory_that_the_user_names_is_that_one_or_none(tmp_path: Path) -> None:
    asked = launch(tmp_path / "mine", is_named=True)
    assert make_run(asked).run.path == tmp_path / "mine"
    assert find_run(asked) == asked
    asked.run.run_json.write_text(json.dumps({}))
    with pytest.raises(UsageError, match="already holds a training"):
        make_run(asked)
    assert find_run(asked) is None  # the first worker says why


def test_a_nodes_workers_find_what_their_first_one_has_made(tmp_path: Path) -> None:
    (tmp_path / "digits").mkdir()  # another training's, of the same second
    first = make_run(launch(tmp_path / "digits", workers=2))
    assert first.run.path.name == "digits-2"
    second = find_run(launch(tmp_path / "digits", workers=2))
    assert second is not None
    assert second.run == first.run
    assert second.request.run_dir == str(first.run.path)


def test_a_worker_that_comes_first_waits_for_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = launch(tmp_path / "digits", workers=2)
    # The first worker makes it while the other waits.
    monkeypatch.setattr(time, "sleep", lambda _: make_run(first))
    second = find_run(launch(tmp_path / "digits", workers=2))
    assert second is not None
    assert second.run.path == tmp_path / "digits"


def test_workers_that_are_started_again_go_on_in_their_directory(tmp_path: Path) -> None:
    first = make_run(launch(tmp_path / "digits", workers=2))
    again = make_run(launch(tmp_path / "digits", workers=2, attempt=1))
    assert again.run == first.run
    first.run.run_json.write_text(json.dumps({}))
    again = make_run(launch(tmp_path / "digits", workers=2, attempt=1))  # refuses nothing
    assert again.run == first.run
