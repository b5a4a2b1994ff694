"""Slurm's commands as this package asks them, with programs of their names that answer as told."""

from pathlib import Path

import pytest

from paceline.launch.slurm import tools


def put_scontrol(directory: Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    command = directory / "scontrol"
    command.write_text("\n".join(("#!/bin/sh", *lines, "")))
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(directory), prepend=":")


def test_a_requeue_that_ends_the_one_who_asked_has_worked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_scontrol(tmp_path, monkeypatch, "kill -TERM $$")
    assert tools.requeue("7") == ""


def test_what_slurm_objects_to_a_requeue_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_scontrol(tmp_path, monkeypatch, "echo 'scontrol: Job is done' >&2", "exit 1")
    assert "Job is done" in tools.requeue("7")
    put_scontrol(tmp_path, monkeypatch, "exit 1")
    assert tools.requeue("7") == "no reason given"
