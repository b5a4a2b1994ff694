"""Runs the `paceline` command as a user does, in a process of its own."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from paceline.cli.app import main
from paceline.errors import ExitCode
from tests.launch.waiting import patient
from tests.support.warm import WarmPython

_DEADLINE_S = 120.0


@dataclass
class Paceline:
    """The command, with a working directory of its own; ends what a failed test leaves running."""

    directory: Path
    warm: bool = True
    """Whether its processes are forked, with torch imported, rather than started from scratch."""
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def run(self, *arguments: str | Path, env: Mapping[str, str] | None = None) -> "Finished":
        """Run to the end."""
        return self.finish(self.start(*arguments, env=env))

    def start(
        self, *arguments: str | Path, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start in a process group of its own, as a terminal does."""
        make = WarmPython if self.warm else subprocess.Popen[str]
        process = make(
            [sys.executable, "-m", "paceline", *map(str, arguments)],
            cwd=self.directory,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def finish(self, process: subprocess.Popen[str]) -> "Finished":
        """Wait for the end."""
        out, err = process.communicate(timeout=patient(_DEADLINE_S))
        return Finished(process.returncode, out, err)

    def end(self) -> None:
        """End what is still running."""
        for process in self.started:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            if process.stdout is not None and not process.stdout.closed:
                process.communicate()


@dataclass(frozen=True)
class Finished:
    """How a command ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def paceline(tmp_path: Path) -> Iterator[Paceline]:
    command = Paceline(tmp_path)
    yield command
    command.end()


@pytest.fixture
def cold_paceline(tmp_path: Path) -> Iterator[Paceline]:
    """As `paceline`, with processes that import everything themselves."""
    command = Paceline(tmp_path, warm=False)
    yield command
    command.end()


@pytest.fixture
def refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Gives what the command, in an empty directory, says of wrong usage; it leaves nothing."""

    def refused(*words: str) -> str:
        monkeypatch.chdir(tmp_path)
        assert main(words) == ExitCode.USAGE
        assert list(tmp_path.iterdir()) == []
        return capsys.readouterr().err

    return refused


def wait_until(
    condition: Callable[[], bool], what: str, process: subprocess.Popen[str] | None = None
) -> None:
    """Wait for a condition; a test that can't reach it, or whose process ended before, fails."""
    deadline_s = time.monotonic() + patient(_DEADLINE_S)
    has_ended = False
    while not condition():
        assert not has_ended, f"ended before: {what}"
        assert time.monotonic() < deadline_s, f"never happened: {what}"
        time.sleep(0.01)
        has_ended = process is not None and process.poll() is not None


def summary(run: Path) -> Mapping[str, object]:
    content: Mapping[str, object] = json.loads((run / "summary.json").read_text())
    return content


def newest_step(run: Path) -> int:
    return max((int(p.name[5:]) for p in (run / "snapshots").glob("step-" + 12 * "?")), default=-1)


def wait_for_step(run: Path, step: int) -> None:
    """Wait for a snapshot of this step or a later one."""
    wait_until(lambda: newest_step(run) >= step, f"a snapshot of step {step} in {run}")


def metrics_without_times(run: Path) -> list[list[str]]:
    """The rows of metrics.csv without what a clock decides."""
    rows = [line.split(",") for line in (run / "metrics.csv").read_text().splitlines()]
    kept = [i for i, name in enumerate(rows[0]) if name not in _TIMED]
    return [[row[i] for i in kept] for row in rows]


_TIMED = {"time_s", "images_per_s", "batch_time_s", "data_time_s", "exposed_comm", "waiting"} | {
    "wire_bytes_per_step"  # of one start
}


def workers_of(process: subprocess.Popen[str]) -> Sequence[psutil.Process]:
    """The worker processes of a running command: grandchildren, made by its fork server."""
    launcher = psutil.Process(process.pid)
    return [p for c in launcher.children() for p in c.children()]
