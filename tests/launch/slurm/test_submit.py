"""Submitting without a Slurm: what is handed over, shown and refused; what is left behind."""

import io
import os
import signal
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.launch.slurm.options import SlurmOptions
from paceline.launch.slurm.requests import requests_noted
from paceline.launch.slurm.submit import job_environment, submit
from paceline.launch.slurm.tail import Tail
from tests.launch.slurm.test_commands import put
from tests.launch.slurm.test_script import job


def test_without_slurm_it_says_so_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="there is no sbatch here"):
        submit(job(directory=tmp_path), SlurmOptions())
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_shows_the_script_and_makes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit(job(directory=tmp_path, dry_run=True), SlurmOptions()) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("#!/bin/bash\n#SBATCH ")
    assert "# submitted by: mkdir -p " in shown
    assert list(tmp_path.iterdir()) == []


def test_a_run_directory_in_use_is_refused_before_hours_in_the_queue(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    with pytest.raises(UsageError, match="already holds a training"):
        submit(job(directory=tmp_path, run_dir="run"), SlurmOptions())


@pytest.mark.parametrize(("shared", "mode"), [(False, 0o700), (True, 0o755)])
def test_others_may_read_the_run_directory_only_if_that_was_asked_for(
    shared: bool, mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put("sbatch", tmp_path, monkeypatch, "echo 7")
    before = os.umask(0o022)
    try:
        asked = job(directory=tmp_path, run_dir="run", shared=shared, detach=True)
        assert submit(asked, SlurmOptions()) == 0
    finally:
        os.umask(before)
    made = [tmp_path / "run", tmp_path / "run" / "slurm"]
    assert [path.stat().st_mode & 0o777 for path in made] == [mode, mode]


def test_the_jobs_environment() -> None:
    here = {
        "HOME": "/me",
        "PACELINE_ON": "slurm",
        "PACELINE_NODES": "2",
        "PACELINE_WORKERS": "4",
        "PACELINE_PARTITION": "gpu",
        "PACELINE_LR": "0.1",
        "SLURM_CONF": "/etc/slurm.conf",
        "SLURM_MEM_PER_CPU": "1",
        "SLURM_JOB_ID": "7",
        "SBATCH_QOS": "high",
    }
    assert job_environment(here, {"TOKEN": "x"}) == {
        "HOME": "/me",
        "PACELINE_LR": "0.1",
        "SLURM_CONF": "/etc/slurm.conf",
        "SBATCH_QOS": "high",
        "TOKEN": "x",
    }


def test_output_is_shown_line_by_line(tmp_path: Path) -> None:
    path, shown = tmp_path / "log", io.StringIO()
    tail = Tail(path, shown)
    tail.pump()  # not there yet
    assert not tail.seen
    text = "one\ntwö\nthree".encode()
    for end in (2, 6, 7, len(text)):  # in the middle of a line, and of a character
        path.write_bytes(text[:end])
        tail.pump()
    assert shown.getvalue() == "one\ntwö\n"
    tail.finish()
    assert shown.getvalue() == "one\ntwö\nthree\n"
    assert tail.seen


def test_signals_close_together_are_one_request() -> None:
    with requests_noted() as requests:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        assert requests.count == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_both_signals_that_ask_to_stop_are_noted(number: signal.Signals) -> None:
    """Not SIGHUP: the job outlives the terminal."""
    before = {n: signal.getsignal(n) for n in (number, signal.SIGHUP)}
    with requests_noted() as requests:
        assert signal.getsignal(number) not in (before[number], signal.SIG_DFL)
        assert signal.getsignal(signal.SIGHUP) == before[signal.SIGHUP]
        signal.raise_signal(number)
        assert requests.count == 1
    assert signal.getsignal(number) == before[number]
