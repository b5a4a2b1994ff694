"""A worker that a user's own launching command has started runs the script that it is given."""

import json
import sys
from pathlib import Path

import pytest

from paceline.launch.errors.error_records import failure_path
from paceline.script import verified
from paceline.training.config import TrainRequest
from paceline.verify.trial import Trial
from tests.support.warm import run_warm

REQUEST = TrainRequest(
    kind="script",
    recipe="train.py",
    reference="/home/me/train.py",
    arguments={},
    script_args=("--lr", "1"),
    settings={},
    given=(),
    run_dir="",
    command=(),
    started_at="",
)


class EndedError(BaseException):
    """Stands for the process's end."""


def end(code: int) -> None:
    """Stand for `os._exit`."""
    raise EndedError(code)


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verified, "die_with_parent", lambda _: None)
    monkeypatch.setattr("os._exit", end)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    path = tmp_path / "trial.json"
    whole = Trial(request=REQUEST.to_json(), records="seen", steps=3, log_dir=str(tmp_path))
    path.write_text(whole.to_json())
    return path


@pytest.mark.parametrize("local", [(), ("--local-rank=1",)])
def test_the_script_has_its_own_arguments_and_its_local_rank(
    local: tuple[str, ...], trial: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    payloads: list[str] = []

    def run_watched(payload: str) -> str:
        payloads.append(payload)
        return json.dumps({"stopped_because": "watched", "cut": False})

    monkeypatch.setattr(verified, "_watch_unseeded", run_watched)
    monkeypatch.setattr(verified, "_finish_script", list)
    with pytest.raises(EndedError, match="0"):
        verified.main([*local, str(trial)])
    given = Trial.from_json(payloads[0])
    assert given.steps == 3
    request = TrainRequest.from_json(given.request)
    assert request.reference == REQUEST.reference
    assert request.script_args == (*local, "--lr", "1")


@pytest.mark.parametrize("cut", [True, False])
def test_only_a_script_that_came_to_its_end_is_finished(
    cut: bool, trial: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = json.dumps({"stopped_because": "watched", "cut": cut})
    finished: list[bool] = []
    monkeypatch.setattr(verified, "_watch_unseeded", lambda payload: said)
    monkeypatch.setattr(verified, "_finish_script", lambda: finished.append(True))
    with pytest.raises(EndedError, match="0"):
        verified.main([str(trial)])
    assert finished == ([] if cut else [True])


LEAVES_WORK = """
import atexit, os, threading, time
from paceline.script import verified

def slow():
    time.sleep(0.1)
    print("thread", flush=True)

threading.Thread(target=slow).start()
atexit.register(print, "end", flush=True)
verified._finish_script()
os._exit(0)
"""


def test_what_a_script_has_left_for_its_end_is_done(tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text(LEAVES_WORK)
    done = run_warm([sys.executable, "leaves.py"], tmp_path)
    assert (done.stdout, done.returncode) == ("thread\nend\n", 0), done.stderr


def test_a_failure_is_recorded_and_ends_the_process_at_once(
    trial: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_watched(payload: str) -> str:
        raise KeyError("lost")

    monkeypatch.setattr(verified, "_watch_unseeded", run_watched)
    with pytest.raises(EndedError, match="65"):
        verified.main([str(trial)])
    recorded = json.loads(failure_path(trial.parent, 1).read_text())
    assert (recorded["rank"], recorded["error_type"]) == (1, "KeyError")
