import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.errors import ExitCode
from paceline.launch import continuing
from paceline.launch.continuing import note_start, resuming, wait_for_host
from tests.launch.waiting import patient


class Became(Exception):  # noqa: N818
    """What the process would have become."""


@pytest.fixture
def becoming(monkeypatch: pytest.MonkeyPatch) -> None:
    def become(program: str, words: list[str]) -> None:
        assert (program, words[:4]) == (sys.executable, [sys.executable, "-P", "-m", "paceline"])
        raise Became(words[4:])

    monkeypatch.setattr(os, "execv", become)
    monkeypatch.setattr(signal, "signal", lambda *_: None)


def become(
    run: Path, *options: str, submission: str = "s1", script: tuple[str, ...] = ()
) -> list[str]:
    command = ["train", "digits", "--lr", "1", "--run-dir", str(run), *script]
    own = ["--run-dir", str(run), "--submission", submission, *options]
    with pytest.raises(Became) as caught:
        continuing.main([*own, "--", *command])
    words: list[str] = caught.value.args[0]
    return words


def begin(run: Path) -> None:
    """Leave what a training leaves once its workers have met."""
    (run / "run.json").write_text("{}")


@pytest.mark.usefixtures("becoming")
def test_started_again_it_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert become(run)[0] == "train"
    assert become(run)[0] == "train"  # the workers hadn't met
    begin(run)
    assert become(run) == ["resume", str(run), "--lr", "1"]


@pytest.mark.usefixtures("becoming")
@pytest.mark.parametrize(("options", "mode"), [((), 0o700), (("--shared",), 0o755)])
def test_others_may_read_what_it_makes_only_if_that_was_asked_for(
    options: tuple[str, ...], mode: int, tmp_path: Path
) -> None:
    before = os.umask(0o022)
    try:
        become(tmp_path / "run", *options)
    finally:
        os.umask(before)
    made = [tmp_path / "run", tmp_path / "run" / "logs"]
    assert [path.stat().st_mode & 0o777 for path in made] == [mode, mode]


@pytest.mark.usefixtures("becoming")
def test_a_scripts_own_arguments_stay_as_they_are(tmp_path: Path) -> None:
    words = become(tmp_path / "run", script=("--", "--submission", "x", "--", "y"))
    assert words[-5:] == ["--", "--submission", "x", "--", "y"]


@pytest.mark.usefixtures("becoming")
def test_another_submission_does_not_go_on_with_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    become(run)
    begin(run)
    snapshot = run / "snapshots" / "step-000000000007"
    snapshot.mkdir(parents=True)
    (snapshot / "manifest.json").write_text('{"step": 7}')
    assert become(run, submission="s2")[0] == "train"  # which refuses
    assert become(run, "--resume", submission="s3")[0] == "resume"


@pytest.mark.usefixtures("becoming")
def test_each_node_has_a_mark_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    monkeypatch.setenv("PET_NODE_RANK", "0")
    become(run)
    begin(run)
    assert become(run)[0] == "resume"
    monkeypatch.setenv("PET_NODE_RANK", "1")
    assert become(run)[0] == "train"


@pytest.mark.usefixtures("becoming")
def test_without_a_newer_snapshot_it_gives_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    options = ("--max-restarts", "1")
    become(run, *options)
    begin(run)
    assert become(run, *options)[0] == "resume"
    snapshot = run / "snapshots" / "step-000000000007"
    snapshot.mkdir(parents=True)
    (snapshot / "manifest.json").write_text('{"step": 7}')
    assert become(run, *options)[0] == "resume"  # the new snapshot allows it one more
    words = ["--run-dir", str(run), "--submission", "s1", *options, "--", "train", "digits"]
    assert continuing.main(words) == ExitCode.JOB
    assert "started 2 times in a row without a newer snapshot" in capsys.readouterr().err


def test_a_directory_that_cannot_be_written_is_left_to_the_training(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.write_text("a file")
    assert note_start(run / "logs" / "s1-node-0.started", run) == 1


def test_a_scripts_arguments_are_left_out_when_it_goes_on() -> None:
    words = "run train.py --shards 4 --run-dir x -- --run-dir y".split()
    assert resuming(words, "/r") == ["resume", "/r", "--shards", "4"]


@pytest.mark.usefixtures("becoming")
def test_a_host_without_an_address(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--run-dir", str(tmp_path), "--submission", "s", "--wait-s", "0.05"]
    code = continuing.main([*options, "--host", "nowhere.invalid", "--", "train", "digits"])
    assert code == ExitCode.INFRASTRUCTURE
    assert "nowhere.invalid, has no address" in capsys.readouterr().err


def test_a_host_that_comes_late(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def look_up(*words: object, **_: object) -> list[object]:
        asked.append(words)
        if len(asked) < 3:
            raise OSError("not yet")
        return []

    monkeypatch.setattr("socket.getaddrinfo", look_up)
    assert wait_for_host("node-0", 1.0)
    assert len(asked) == 3


def test_it_becomes_the_command_and_keeps_its_process(tmp_path: Path) -> None:
    """A refusal of the real command shows that it ran: exit code, and one process."""
    run = tmp_path / "run"
    words = ["--run-dir", str(run), "--submission", "s", "--", "train", "digits", "--lr", "no"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "paceline.launch.continuing", *words],
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == ExitCode.USAGE, done.stderr
    assert "--lr" in done.stderr
    assert [path.name for path in (run / "logs").iterdir()] == ["s-node-0.started"]


def test_sigterm_while_it_waits_is_a_stop(tmp_path: Path) -> None:
    words = ["--run-dir", str(tmp_path), "--submission", "s", "--host", "nowhere.invalid"]
    code = (
        "import socket, time; from paceline.launch import continuing\n"
        "def late(*a, **k):\n    print('waits', flush=True); raise OSError\n"
        "socket.getaddrinfo = late\n"
        f"raise SystemExit(continuing.main({json.dumps([*words, '--', 'train', 'digits'])}))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        process.terminate()
        deadline_s = time.monotonic() + patient(30)
        while process.poll() is None:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        assert process.returncode == ExitCode.RESUMABLE
    finally:
        process.kill()
        process.communicate()
