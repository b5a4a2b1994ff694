"""A launching command is run to its end, and what became of its workers is known."""

import os
import time
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.files import write_json
from paceline.launch.errors.failures import WorkerFailure
from paceline.launch.local.launcher import LaunchOutcome
from paceline.verify import observed_launch
from paceline.verify.observed_launch import run_observed
from paceline.verify.trial import output_path

SUMMARY = """
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-23_17:28:29
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 4)
  error_file: <N/A>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-23_17:28:29
  host      : localhost
  rank      : 12 (local_rank: 1)
  exitcode  : -9 (pid: 3)  (SIGKILL)
  error_file: <N/A>
"""


def run(tmp_path: Path, script: str, started: int = 2) -> LaunchOutcome:
    """Have a shell be the launcher of two workers, of which so many have begun."""
    for rank in range(started):
        output_path(tmp_path, rank).touch()
    return run_observed(
        ["sh", "-c", script],
        dict(os.environ),
        workers=2,
        records=tmp_path,
        log_dir=tmp_path / "logs",
    )


def test_a_command_that_ends_well(tmp_path: Path) -> None:
    outcome = run(tmp_path, "echo done")
    assert (outcome.interrupted, outcome.failures) == (False, ())
    assert (tmp_path / "logs" / "command.log").read_text() == "done\n"


def test_what_an_earlier_launch_left_is_not_this_ones(tmp_path: Path) -> None:
    record = tmp_path / "logs" / "failure-rank-1.json"
    record.parent.mkdir()
    record.write_text("{}")
    assert run(tmp_path, "true").failures == ()
    assert not record.exists()


def test_a_launcher_that_starts_nobody_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observed_launch, "_START_S", 0.0)
    with pytest.raises(UsageError, match="started no worker that could be observed"):
        run(tmp_path, "exec sleep 1000", started=0)


def test_a_worker_tells_of_its_own_failure(tmp_path: Path) -> None:
    failure = WorkerFailure(
        rank=1,
        host="here",
        step=None,
        exit_code=65,
        signal_name=None,
        kind="job",
        error_type="KeyError",
        message="lost",
        traceback="",
        operation="",
    )
    write_json(tmp_path / "record", failure.to_json())
    place = tmp_path / "logs" / "failure-rank-1.json"
    assert run(tmp_path, f"cp {tmp_path}/record {place}; exit 1").failures == (failure,)


def test_torchrun_tells_of_a_worker_that_was_killed(tmp_path: Path) -> None:
    (tmp_path / "summary").write_text(SUMMARY)
    (killed,) = run(tmp_path, f"cat {tmp_path}/summary; exit 1").failures
    assert (killed.rank, killed.signal_name, killed.kind) == (12, "SIGKILL", "infrastructure")
    assert "exitcode  : -9" in killed.traceback


def test_a_command_that_fails_without_a_word(tmp_path: Path) -> None:
    (failure,) = run(tmp_path, "exit 3").failures
    assert "ended its process with exit code 3" in failure.message


@pytest.mark.parametrize(
    ("script", "started", "message"),
    [
        ("echo no such option; exit 2", 0, "started no worker that could be observed"),
        ("echo no such option", 1, "started 1 worker instead of 2"),
    ],
)
def test_a_command_that_starts_fewer_workers(
    script: str, started: int, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        run(tmp_path, script, started)
    assert "Last output:\nno such option" in str(raised.value)


@pytest.mark.parametrize("name", ["nowhere", "no_program"])
def test_a_program_that_cannot_be_run(name: str, tmp_path: Path) -> None:
    (tmp_path / "no_program").touch()
    with pytest.raises(UsageError, match=name):
        run_observed(
            [str(tmp_path / name)],
            {},
            workers=1,
            records=tmp_path,
            log_dir=tmp_path / "logs",
        )


@pytest.mark.parametrize("trap", ["", "trap '' TERM; "])
def test_a_signal_ends_the_command_and_what_it_has_started(trap: str, tmp_path: Path) -> None:
    begun_s = time.monotonic()
    outcome = run(tmp_path, f"{trap}sleep 100 & echo $!; kill -TERM $PPID; wait; wait")
    assert outcome.interrupted
    assert outcome.failures == ()
    pid = int((tmp_path / "logs" / "command.log").read_text())
    while Path(f"/proc/{pid}").exists() and not is_zombie(pid):
        assert time.monotonic() - begun_s < 60
        time.sleep(0.01)


def is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
