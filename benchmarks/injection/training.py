"""A training that faults are done to, seen from outside: its commands, processes and files."""

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, final

import psutil

from benchmarks.commands import environment
from benchmarks.injection.cgroup import Cgroup
from benchmarks.injection.draw import Draw
from benchmarks.injection.inside import FAULT, HAPPENED, HOLD, STAMPS, Fault
from benchmarks.stamps import read_stamps

STEPS = 92
"""Of the whole undisturbed training: four epochs."""
EPOCHS = 4
SHARDS = 4
EVERY_STEPS = 7
"""A snapshot, besides those at the ends of epochs."""

_PACELINE = str(Path(sys.executable).with_name("paceline"))
_HERE = Path(__file__).parent
_LIMIT_S = 240.0
_GRACE_S = 10.0
_HELD_AFTER = 6
_TAIL = 3000


class BrokenPromiseError(AssertionError):
    """What is documented didn't hold, or a fault could not be done; the message says what."""


class MissedError(BrokenPromiseError):
    """The command ended before the fault could be done."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended."""

    code: int
    """Negative for a signal."""
    text: str
    """All that it printed."""


@final
class Training:
    """One training in a room (a directory) of its own; its commands run one after the other."""

    def __init__(self, room: Path, drawn: Draw, temporary: Path) -> None:
        """Args:
        room: An empty directory.
        drawn: The run.
        temporary: Where its commands put temporary files; made where it isn't there.
        """
        self.room = room
        self.drawn = drawn
        self.random = random.Random(f"{drawn.seed} inside {drawn.number}")
        self.run_dir = room / "run"
        self.temporary = temporary
        self.options: list[str] = []
        """Further options of every command."""
        self.wrap: list[str] = []
        """Words before the command's own."""
        self.variables: dict[str, str] = {}
        self.ended: list[Ended] = []
        self.helpers: list[subprocess.Popen[bytes]] = []
        """Processes of the fault itself, ended with the command."""
        self.held: list[socket.socket] = []
        """Ports that the fault takes."""
        self.cgroup: Cgroup | None = None
        """What the fault has put the command into."""
        self._process: subprocess.Popen[bytes] | None = None
        self._target = self._num_workers = 0
        for directory in (temporary, room / STAMPS):
            directory.mkdir(exist_ok=True)

    # Commands.

    def start(self, *, held: bool = True) -> None:
        """Start the training, or resume it where it has begun.

        Args:
            held: Whether it waits soon after the drawn moment until `end`, so that a fault from
                outside can't come too late.
        """
        self._target, self._num_workers = self.steps_to_do(), self._next_workers()
        if held:
            (self.room / HOLD).write_text(str(self._target + _HELD_AFTER))
        for stamp in (self.room / STAMPS).iterdir():
            stamp.unlink()
        with self._output().open("wb") as file:
            self._process = self.popen(self.command(), file)

    def popen(self, words: Sequence[str], file: BinaryIO) -> "subprocess.Popen[bytes]":
        """Start a command as the training's own are: in a session, its output in a file."""
        return subprocess.Popen(
            words,
            cwd=self.room,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**environment(), "TMPDIR": str(self.temporary), **self.variables},
        )

    def command(self) -> list[str]:
        """Write the command that begins this training, or goes on with it."""
        if not self.has_begun():
            return self.beginning()
        words = ["resume", str(self.run_dir), "--workers", str(self._next_workers())]
        return [*self.wrap, _PACELINE, *words, *self.options]

    def beginning(self) -> list[str]:
        """Write the command that begins this training."""
        common = f"--workers {self.drawn.workers} --threads 1 --shards {SHARDS} --progress plain"
        common += f" --snapshot-every-steps {EVERY_STEPS} --device cpu --run-dir"
        options = [*common.split(), str(self.run_dir), *self.options]
        if "--loader-workers" not in options:
            options += ["--loader-workers", str(self.drawn.loaders)]
        if self.drawn.form == "script":
            words = ["run", str(_HERE / "script.py"), *options, "--", str(self.room)]
        else:
            module = "benchmarks.injection.recipe"
            where = module if self.drawn.form == "recipe" else str(_HERE / "recipe.py")
            words = ["train", f"{where}:disturbed", "--room", str(self.room), *options]
        return [*self.wrap, _PACELINE, *words]

    def end(self, codes: Sequence[int], says: str = "") -> Ended:
        """Let the command go on, wait for its end, and hold it to what is documented.

        Args:
            codes: Exit codes that are right.
            says: A pattern that its output must match.

        Raises:
            BrokenPromiseError: It hangs, or ended otherwise, or left a process.
        """
        self.release()
        code = self._wait()
        ended = Ended(code=code, text=self._output().read_text(errors="replace"))
        self.ended.append(ended)
        self._process = None
        for helper in self.helpers:
            helper.kill()
            helper.wait()
        self.helpers.clear()
        if left := survivors():
            raise BrokenPromiseError(f"{', '.join(left)} outlived the command")
        if code not in codes:
            wanted = " or ".join(map(str, codes))
            raise BrokenPromiseError(
                f"exit code {code} instead of {wanted}:\n{ended.text[-_TAIL:]}"
            )
        if not re.search(says, ended.text, re.DOTALL):
            raise BrokenPromiseError(f"no word of {says!r}:\n{ended.text[-_TAIL:]}")
        return ended

    def has_begun(self) -> bool:
        """Tell whether there is something to resume."""
        return (self.run_dir / "run.json").exists()

    def is_done(self) -> bool:
        """Tell whether the last command ended with 0."""
        return bool(self.ended) and self.ended[-1].code == 0

    def kill(self) -> None:
        """End whatever still runs."""
        for process in (*([self._process] if self._process else []), *self.helpers):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        survivors(grace_s=0.0)

    # The moment.

    def steps_to_do(self) -> int:
        """Give the drawn moment as a number of steps of the next command's workers."""
        return max(1, int(self.drawn.moment * (STEPS - self.newest_step())))

    def newest_step(self) -> int:
        """Give the step of the newest snapshot; 0 where there is none."""
        names = (path.name for path in self.run_dir.glob("snapshots/step-" + 12 * "?"))
        return max((int(name[5:]) for name in names if name[5:].isdecimal()), default=0)

    def reach(self) -> None:
        """Wait for the drawn moment."""
        self.until(
            lambda: min(self._steps_of_live(), default=0) >= self._target,
            f"{self._target} steps",
        )

    def release(self) -> None:
        """Let the training go on past the drawn moment."""
        (self.room / HOLD).unlink(missing_ok=True)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for something while the command runs.

        Raises:
            MissedError: The command ended well before.
            BrokenPromiseError: It failed before, or it takes too long.
        """
        deadline_s = time.monotonic() + _LIMIT_S
        while not condition():
            if self._process is not None and self._process.poll() is not None:
                text = self._output().read_text(errors="replace")[-_TAIL:]
                code = self._process.returncode
                how = MissedError if code == 0 else BrokenPromiseError
                raise how(f"ended with {code} before {what}:\n{text}")
            if time.monotonic() > deadline_s:
                raise BrokenPromiseError(f"{what}: not within {_LIMIT_S:.0f} s")
            time.sleep(0.003)

    def fault_inside(self, fault: Fault) -> None:
        """Have the workers of the next command do a fault themselves."""
        fault.write(self.room)

    def has_happened(self) -> bool:
        """Tell whether the fault inside was done; forget it."""
        happened = (self.room / HAPPENED).exists()
        for name in (FAULT, HAPPENED):
            (self.room / name).unlink(missing_ok=True)
        return happened

    # Processes.

    @property
    def launcher(self) -> int:
        """The running command's process."""
        assert self._process is not None
        return self._process.pid

    def is_running(self) -> bool:
        """Tell whether the command still runs."""
        return self._process is not None and self._process.poll() is None

    def workers(self) -> list[int]:
        """List the live workers' processes by rank."""
        return [stamp[1] for stamp in sorted(self._live_stamps())]

    def worker(self) -> int:
        """Give the process of the drawn rank; wait where none lives, as after another fault."""
        self.until(lambda: bool(self.workers()), "any worker's life")
        workers = self.workers()
        return workers[self.drawn.rank % len(workers)] if workers else self.worker()

    @property
    def rank(self) -> int:
        """Which worker of the next command a fault inside is done to."""
        return self.drawn.rank % self._next_workers()

    def signal(self, number: int, *processes: int) -> None:
        """Send a signal.

        Raises:
            MissedError: None of the processes is there any more.
        """
        sent = 0
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)
                sent += 1
        if not sent:
            raise MissedError("the process is gone")

    def fork_server(self) -> int:
        """Give the parent of the workers."""
        return self.relatives(self.worker())[0]

    def relatives(self, pid: int) -> list[int]:
        """List a process's parent and its children.

        Raises:
            MissedError: It is gone.
        """
        try:
            process = psutil.Process(pid)
            return [process.ppid(), *(child.pid for child in process.children())]
        except psutil.NoSuchProcess:
            raise MissedError("the process is gone") from None

    def _live_stamps(self) -> list[tuple[int, int, int]]:
        found = read_stamps(self.room / STAMPS)
        return [(s.rank, s.pid, s.steps) for s in found if is_alive(s.pid)]

    def _steps_of_live(self) -> list[int]:
        live = self._live_stamps()
        return [steps for _, _, steps in live] if len(live) == self._num_workers else []

    def _next_workers(self) -> int:
        """Count the workers of the next command."""
        if not self.has_begun():
            return self.drawn.workers
        return self.drawn.resume_on[(len(self.ended) - 1) % len(self.drawn.resume_on)]

    def _output(self) -> Path:
        return self.room / f"output-{len(self.ended)}.txt"

    def _wait(self) -> int:
        assert self._process is not None
        try:
            return self._process.wait(_LIMIT_S)
        except subprocess.TimeoutExpired:
            text = self._output().read_text(errors="replace")[-_TAIL:]
            raise BrokenPromiseError(
                f"the command didn't end within {_LIMIT_S:.0f} s:\n{text}"
            ) from None


def is_alive(pid: int) -> bool:
    """Tell whether a process exists and isn't a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def survivors(grace_s: float = _GRACE_S) -> list[str]:
    """Name what still runs below this process after a moment, and end it.

    This process adopts its descendants' orphans, so that nothing can have got away.
    """
    deadline_s = time.monotonic() + grace_s
    while (left := _descendants()) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    named = [f"process {p.pid} ({' '.join(_words(p))[:120]})" for p in left]
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return named


def _descendants() -> list[psutil.Process]:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    found = psutil.Process().children(recursive=True)
    return [process for process in found if is_alive(process.pid)]


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return ["gone"]
