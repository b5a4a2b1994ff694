"""Submitting without a Slurm: what is handed over, shown and refused; what is left behind."""

import os
import signal
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.launch.cluster import ClusterJob
from paceline.launch.follow import launch
from paceline.launch.slurm import commands
from paceline.launch.slurm.launcher import SlurmLauncher, job_environment
from paceline.launch.slurm.options import SlurmOptions
from paceline.launch.tail import Tail
from tests.launch.slurm.test_commands import put
from tests.launch.slurm.test_script import job


def submit(job: ClusterJob, options: SlurmOptions) -> int:
    return launch(SlurmLauncher(options), job)


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
    assert job_environment(here) == {
        "HOME": "/me",
        "PACELINE_LR": "0.1",
        "SLURM_CONF": "/etc/slurm.conf",
        "SBATCH_QOS": "high",
    }


def test_output_is_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail, shown = Tail(path), ""
    assert tail.read() == ""  # not there yet
    assert not tail.seen
    text = "one\ntwö\nthree".encode()
    for end in (2, 6, 7, len(text)):  # in the middle of a line, and of a character
        path.write_bytes(text[:end])
        shown += tail.read()
    assert shown == "one\ntwö\n"
    assert tail.read(whole_lines=False) == "three\n"
    assert tail.read(whole_lines=False) == ""
    assert tail.seen


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_job_outlives_the_terminal(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, while_submitted = signal.getsignal(number), []

    def note(*words: object) -> str:
        while_submitted.append(signal.getsignal(number))
        return "7"

    monkeypatch.setattr(commands, "submit_script", note)
    asked = job(directory=tmp_path, run_dir="run", detach=True)
    assert submit(asked, SlurmOptions()) == 0
    assert (while_submitted == [before]) == (number == signal.SIGHUP)
