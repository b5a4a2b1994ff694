"""Watching workers that torchrun, Slurm, MPI or the user started: a process beside them.

Each worker leaves a notice in the run directory; the first worker of each node starts one watching
process for the node (Linux), which ends with that worker.
"""

import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.files import read_json, write_json
from paceline.launch.heartbeat import StepNote
from paceline.launch.watchdog.hang_detector import HangLimits
from paceline.options.fields import read_dataclass
from paceline.results.run_directory import log_path

_END_S = 5.0
_PACKAGES = Path(__file__).parents[3]


@dataclass(frozen=True, kw_only=True)
class WatchedWorkers:
    """The workers that one process watches."""

    log_dir: Path
    rank: int
    """Of the worker that starts it."""
    workers: int
    """Of this node."""
    world_size: int
    node: int
    """Number of this node among those of the training."""
    attempt: int
    limits: HangLimits

    def to_json(self) -> str:
        """Write it as JSON."""
        return json.dumps({**asdict(self), "log_dir": str(self.log_dir)})

    @staticmethod
    def from_json(text: str) -> "WatchedWorkers":
        """Read what `to_json` wrote."""
        content = json.loads(text)
        limits, log_dir = HangLimits(**content.pop("limits")), Path(content.pop("log_dir"))
        return WatchedWorkers(**content, limits=limits, log_dir=log_dir)


@dataclass(frozen=True, kw_only=True)
class Notice:
    """What a worker leaves in the run directory for the process that watches it."""

    host: str
    node: int
    attempt: int
    pid: int
    note: str
    """The path of its note."""

    @property
    def place(self) -> tuple[str, int, int]:
        """The same for all workers of a node."""
        return self.host, self.node, self.attempt

    @classmethod
    def read(cls, path: Path) -> "Notice | None":
        """Read a notice; None where there is none, or it isn't whole."""
        try:
            return read_dataclass(cls, read_json(path), strict=True)
        except (OSError, ValueError):
            return None


def notice_path(log_dir: Path, rank: int) -> Path:
    """Name the file in which a worker says where its note is."""
    return log_dir / f".watch-rank-{rank}.json"


@contextmanager
def watched(note: StepNote, watch: WatchedWorkers, *, starts: bool) -> Iterator[None]:
    """Have this worker watched while the block runs, from outside its interpreter.

    Does nothing where its launcher watches it already, or the system can't share a note.

    Args:
        starts: Whether this is the node's first worker, which starts the process.
    """
    place = None if note.is_shared else note.share_unnamed()
    if place is None:
        yield
        return
    notice = notice_path(watch.log_dir, watch.rank)
    # The handler is there before the notice: once it is read, SIGUSR1 may come, which kills
    # a process without a handler.
    with _stacks_on_request(log_path(watch.log_dir, watch.rank)):
        with suppress(OSError):  # on a full disk there is no watchdog
            left = Notice(
                host=socket.gethostname(),
                node=watch.node,
                attempt=watch.attempt,
                pid=os.getpid(),
                note=str(place),
            )
            write_json(notice, asdict(left))
        process = _start(watch) if starts else None
        try:
            yield
        finally:
            # In the opposite order: nobody new watches this worker, then the process ends.
            notice.unlink(missing_ok=True)
            if process is not None:
                process.terminate()
                try:
                    process.wait(_END_S)
                except subprocess.TimeoutExpired:  # the machine is busy
                    process.kill()
                    process.wait()


@contextmanager
def _stacks_on_request(path: Path) -> Iterator[None]:
    """Write the stacks into the log on SIGUSR1, unless the script has a use for this signal."""
    if signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL:
        yield
        return
    with path.open("a") as log:
        faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
        try:
            yield
        finally:
            faulthandler.unregister(signal.SIGUSR1)


def _start(watch: WatchedWorkers) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(filter(None, (str(_PACKAGES), os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "paceline.launch.watchdog", str(os.getpid()), watch.to_json()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
    )
