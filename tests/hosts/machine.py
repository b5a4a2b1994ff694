"""A machine of the rig: namespaces of its own for network, names, processes and mounts."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil

from tests.launch.waiting import patient, until

_HERE = Path(__file__).parent
_UNSHARE = "unshare --net --uts --ipc --pid --mount --fork --kill-child --mount-proc".split()
_PYTHON = (sys.executable, "-I", "-S")
_LIMIT_S = 60.0
_OF_A_LOGIN = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TMPDIR")


def login_environment() -> dict[str, str]:
    """Give what a user finds after logging in, whatever the tests were started with."""
    return {name: os.environ[name] for name in _OF_A_LOGIN if name in os.environ}


@dataclass
class Machine:
    """One host: runs commands, is killed, frozen, powered off and on again.

    Its namespaces have no names anywhere and end with its processes, so that nothing of it can be
    left behind. /run, /dev/shm and /media are its own; all else is the real machine's, like a file
    system that hosts share.
    """

    name: str
    address: str
    directory: Path
    """For logs and the like; of this machine alone."""
    hosts_file: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    """What every process of the machine finds in its environment, whoever starts it."""
    _power: "subprocess.Popen[str] | None" = None
    _init: int = 0
    _started: list["subprocess.Popen[str]"] = field(default_factory=list)

    @property
    def init(self) -> int:
        """Process 1 of the machine, as it is numbered outside."""
        return self._init

    @property
    def _log(self) -> Path:
        return self.directory / "init.log"

    @property
    def is_on(self) -> bool:
        return self._power is not None

    def switch_on(self) -> None:
        """Make the namespaces; the machine has a loopback interface and no other yet."""
        settings = {
            "name": self.name,
            "hosts": str(self.hosts_file),
            "empty": str(self.directory / "empty"),
            "home": str(Path.home()),
        }
        (self.directory / "empty").touch()
        with self._log.open("a") as log:
            self._power = subprocess.Popen(
                [*_UNSHARE, *_PYTHON, str(_HERE / "init.py"), json.dumps(settings)],
                env={**login_environment(), **self.environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self._hear("ready")
        (self._init,) = (child.pid for child in psutil.Process(self._power.pid).children())

    def switch_off(self) -> None:
        """Kill process 1, and with it every other; returns when all are gone."""
        if self._power is None:
            return
        power, self._power = self._power, None
        with suppress(ProcessLookupError):
            # Killed alone, `unshare` would be gone before what it started; it ends with that.
            os.kill(self._init or power.pid, signal.SIGKILL)
        power.wait(patient(_LIMIT_S))
        self._init = 0
        _close(power)

    def close(self) -> None:
        """Switch off, and collect every process that was started here."""
        self.switch_off()
        for process in self._started:
            process.kill()
            process.wait(patient(_LIMIT_S))
            _close(process)

    def start_daemon(self, *command: str) -> None:
        """Start a child of process 1; what it says goes to `daemon.log`."""
        self._tell("start", str(self.directory / "daemon.log"), *command)

    def signal_all(self, number: int) -> None:
        """Send a signal to every process of the machine, process 1 alone excepted."""
        self._tell("signal", str(int(number)))

    def popen(
        self,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: int | IO[str] = subprocess.DEVNULL,
        stdout: int | IO[str] = subprocess.PIPE,
        stderr: int | IO[str] = subprocess.STDOUT,
    ) -> "subprocess.Popen[str]":
        """Start a command here, in a session of its own.

        Signals sent to it and its exit code are the command's, though its number isn't: that is
        the number of a process outside that stands for it. Killed at the end of the rig.

        Args:
            argv: The command.
            env: Added to the environment that a login has, and the machine's own.
            cwd: The working directory; the tests' own by default.
            stdin: As in `subprocess.Popen`; empty by default.
            stdout: As in `subprocess.Popen`; a pipe by default.
            stderr: As in `subprocess.Popen`; where stdout goes by default.
        """
        place = [str(_HERE / "enter.py"), str(self._init), str(cwd or Path.cwd())]
        process = subprocess.Popen(
            [*_PYTHON, *place, *map(str, argv)],
            env={**login_environment(), **self.environment, **(env or {})},
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout_s: float = _LIMIT_S,
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command here to its end; stdout and stderr apart. Any exit code is fine."""
        process = self.popen(argv, env=env, cwd=cwd, stderr=subprocess.PIPE)
        try:
            out, err = process.communicate(timeout=patient(timeout_s))
        finally:
            process.kill()
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def all_processes(self) -> list[psutil.Process]:
        """Every process here but process 1 and zombies, numbered as outside."""
        if not self.is_on:
            return []
        own = _namespace(self._init)
        found = [pid for pid in psutil.pids() if pid != self._init and _namespace(pid) == own]
        return [process for pid in found if (process := _living(pid)) is not None]

    def processes(self) -> list[psutil.Process]:
        """What users run here: every process but process 1, ssh's server and zombies."""
        return [process for process in self.all_processes() if not _is_server(process)]

    def wait_until_empty(self, limit_s: float = _LIMIT_S) -> None:
        """Wait for the last process to be gone."""
        until(lambda: not self.all_processes(), limit_s)

    def _tell(self, *command: str) -> None:
        assert self._power is not None, f"{self.name} is off"
        assert self._power.stdin is not None
        self._power.stdin.write(json.dumps(command) + "\n")
        self._power.stdin.flush()
        self._hear("done")

    def _hear(self, word: str) -> None:
        assert self._power is not None
        assert self._power.stdout is not None
        answer = self._power.stdout.readline()
        if answer != f"{word}\n":
            raise RuntimeError(
                f"{self.name} said {answer!r}, not {word!r}\n{self._log.read_text()}"
            )


def _namespace(pid: int) -> str:
    with suppress(OSError):
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    return ""


def _living(pid: int) -> psutil.Process | None:
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process
    return None


def _is_server(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.name().startswith("sshd")
    return True


def _close(process: "subprocess.Popen[str]") -> None:
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
