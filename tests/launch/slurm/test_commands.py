"""Slurm's commands as this package asks them, with programs of their names that answer as told."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.errors import InfrastructureError, UsageError
from paceline.launch.slurm import commands


def put_scontrol(directory: Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    put("scontrol", directory, monkeypatch, *lines)


def put(name: str, directory: Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    command = directory / name
    command.write_text("\n".join(("#!/bin/sh", *lines, "")))
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(directory), prepend=":")


def test_a_requeue_that_ends_the_one_who_asked_has_worked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_scontrol(tmp_path, monkeypatch, "kill -TERM $$")
    assert commands.requeue("7") == ""


def test_what_slurm_objects_to_a_requeue_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_scontrol(tmp_path, monkeypatch, "echo 'scontrol: Job is done' >&2", "exit 1")
    assert "Job is done" in commands.requeue("7")
    put_scontrol(tmp_path, monkeypatch, "exit 1")
    assert commands.requeue("7") == "no reason given"


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (commands.forbid_requeue, "scontrol update JobId=7 Requeue=0"),
        (commands.signal_workers, "scancel --signal=TERM 7"),
        (commands.cancel, "scancel 7"),
        (commands.requeue, "scontrol requeue 7"),
    ],
)
def test_slurm_is_asked_in_the_words_of_its_manual(
    ask: Callable[[str], object], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """scancel: "If a signal is given, the batch step isn't signaled"; TERM lets workers save."""
    for name in ("scontrol", "scancel"):
        put(name, tmp_path, monkeypatch, f'echo "{name} $*" >> {tmp_path}/asked')
    ask("7")
    assert (tmp_path / "asked").read_text() == f"{words}\n"


@pytest.mark.parametrize(
    ("printed", "has"), [("7.0", True), ("7.batch\n7.12", True), ("7.batch", False), ("", False)]
)
def test_a_job_has_workers_once_it_has_a_step_of_tasks(
    printed: str, has: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put("squeue", tmp_path, monkeypatch, f"printf '%s\\n' '{printed}'")
    assert commands.has_workers("7") is has


@pytest.mark.parametrize(
    ("printed", "number"), [("42", "42"), ("42;cluster", "42"), ("a warning\n43", "43")]
)
def test_the_jobs_number_is_what_sbatch_prints_last(
    printed: str, number: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put("sbatch", tmp_path, monkeypatch, f"printf '%s\\n' '{printed}'")
    assert commands.submit_script([], "job.sh", dict(os.environ)) == number


@pytest.mark.parametrize(
    ("words", "kind", "said"),
    [
        ("sbatch: error: invalid partition specified: x", UsageError, "refuses the job: invalid p"),
        ("sbatch: error: Unable to contact slurm controller", InfrastructureError, "not answer"),
    ],
)
def test_a_refusal_is_the_users_and_silence_isnt(
    words: str, kind: type[Exception], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put("sbatch", tmp_path, monkeypatch, f"echo '{words}' >&2", "exit 1")
    with pytest.raises(kind, match=said):
        commands.submit_script([], "job.sh", dict(os.environ))
