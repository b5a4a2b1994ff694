"""Runs a short training in one plain process, as a user would."""

import subprocess
import sys
from pathlib import Path

from tests.launch.waiting import patient
from tests.support.warm import run_warm

_DEADLINE_S = 120.0


def train_here(directory: Path, *arguments: str) -> str:
    """Run `paceline train ... --on here` in a directory, to its end; returns what it printed.

    The process is a warm one.
    """
    command = [sys.executable, "-m", "paceline", "train", *arguments, "--on", "here"]
    done = run_warm(command, directory)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_in(directory: Path, command: list[str], path: str | None = None) -> str:
    """Run a command that must succeed; returns what it printed."""
    done = subprocess.run(
        command,
        cwd=directory,
        env=None if path is None else {**_environment(), "PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=patient(_DEADLINE_S),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _environment() -> dict[str, str]:
    import os

    return dict(os.environ)
