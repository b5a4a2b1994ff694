import faulthandler
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.launch.errors.error_records import failure_path
from paceline.launch.local.worker import run_here
from paceline.results.run_directory import log_path


def greet(payload: str) -> str:
    print("greeting", payload)
    assert faulthandler.is_enabled()
    os.kill(os.getpid(), signal.SIGUSR1)
    return payload.upper()


def refuse(payload: str) -> str:
    raise ValueError(payload)


def test_the_entry_runs_in_this_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environment, streams = dict(os.environ), (sys.stdout, sys.stderr)
    assert run_here(f"{__name__}:greet", "you", tmp_path / "logs", 2, 1) == "YOU"
    assert capsys.readouterr().out == "greeting you\n"
    log = log_path(tmp_path / "logs", 2).read_text()
    assert "attempt 1, rank 2 of " in log
    assert "greeting you\n" in log
    assert "in greet" in log  # the stack that SIGUSR1 asked for
    assert dict(os.environ) == environment
    assert (sys.stdout, sys.stderr) == streams


def test_a_failure_is_recorded_and_raised(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not today"):
        run_here(f"{__name__}:refuse", "not today", tmp_path, 0, 0)
    assert json.loads(failure_path(tmp_path, 0).read_text())["kind"] == "job"
    assert "ValueError: not today" in log_path(tmp_path, 0).read_text()


@pytest.mark.parametrize("entry", ["nothing", f"{__name__}:missing", f"{__name__}:"])
def test_an_entry_must_be_a_function(tmp_path: Path, entry: str) -> None:
    with pytest.raises((UsageError, ModuleNotFoundError)):
        run_here(entry, "", tmp_path, 0, 0)
    assert failure_path(tmp_path, 0).exists()
