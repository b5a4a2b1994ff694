"""A worker that a user's own launching command has started runs the script that it is given."""

import json
from pathlib import Path

import pytest

from paceline.launch.errors.error_records import failure_path
from paceline.script import verified
from paceline.training.config import TrainRequest
from paceline.verify.trial import Trial

REQUEST = TrainRequest(
    kind="script",
    recipe="train.py",
    reference="",
    arguments={},
    settings={},
    given=(),
    run_dir="",
    command=(),
    started_at="",
)


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verified, "die_with_parent", lambda _: None)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    path = tmp_path / "trial.json"
    whole = Trial(request=REQUEST.to_json(), records="seen", steps=3, log_dir=str(tmp_path))
    path.write_text(whole.to_json())
    return path


@pytest.mark.parametrize(
    ("before", "words", "reference", "arguments"),
    [
        ((), ("train.py", "--lr", "1"), "{here}/train.py", ("--lr", "1")),
        ((), ("-m", "pkg.train", "-m"), "pkg.train", ("-m",)),
        (
            ("--local-rank=1",),
            ("train.py", "--lr"),
            "{here}/train.py",
            ("--local-rank=1", "--lr"),
        ),
    ],
)
def test_script_and_arguments(
    before: tuple[str, ...],
    words: tuple[str, ...],
    reference: str,
    arguments: tuple[str, ...],
    trial: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    payloads: list[str] = []

    def run_watched(payload: str) -> str:
        payloads.append(payload)
        return json.dumps({"stopped_because": "watched", "cut": False})

    monkeypatch.setattr(verified, "_watch_unseeded", run_watched)
    verified.main([*before, str(trial), *words])
    given = Trial.from_json(payloads[0])
    assert given.steps == 3
    request = TrainRequest.from_json(given.request)
    assert request.reference == reference.format(here=trial.parent)
    assert request.script_args == arguments


class EndedError(BaseException):
    """Stands for the process's end."""


def test_a_training_that_is_cut_off_ends_the_process_at_once(
    trial: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(code: int) -> None:
        raise EndedError(code)

    cut = json.dumps({"stopped_because": "watched", "cut": True})
    monkeypatch.setattr(verified, "_watch_unseeded", lambda payload: cut)
    monkeypatch.setattr("os._exit", end)
    with pytest.raises(EndedError, match="0"):
        verified.main([str(trial), "train.py"])


def test_a_failure_is_recorded_and_ends_the_process_at_once(
    trial: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_watched(payload: str) -> str:
        raise KeyError("lost")

    def end(code: int) -> None:
        raise EndedError(code)

    monkeypatch.setattr(verified, "_watch_unseeded", run_watched)
    monkeypatch.setattr("os._exit", end)
    with pytest.raises(EndedError, match="65"):
        verified.main([str(trial), "train.py"])
    recorded = json.loads(failure_path(trial.parent, 1).read_text())
    assert (recorded["rank"], recorded["error_type"]) == (1, "KeyError")
