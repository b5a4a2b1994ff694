"""A training that is started on the client, over hosts that ssh reaches."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from tests.hosts.machine import Machine, login_environment
from tests.hosts.rig import Rig
from tests.launch.waiting import patient, until

RECIPE = f"{Path(__file__).with_name('recipe.py')}:build"
COMMON = ("--shards", "4", "--snapshot-every-steps", "2", "--progress", "plain")
_LIMIT_S = 120.0


class OverHosts:
    """`paceline train --hosts`, with the recipe that stops at a gate in each attempt."""

    def __init__(self, rig: Rig, directory: Path, *, hang_after_s: int = 0) -> None:
        """Start it on all hosts of the rig, a worker each.

        Args:
            rig: Where.
            directory: For the run directory and all else; the hosts share it.
            hang_after_s: When a hang counts as one; 0: never, since tests may be slow at a gate.
        """
        directory.mkdir()
        self._directory = directory
        self.run_dir = directory / "run"
        self._room = directory / "room"
        self._room.mkdir()
        hosts = ",".join(f"{host.name}:1" for host in rig.hosts)
        where = ["--hosts", hosts, "--ssh-config", str(rig.ssh_config)]
        own = ["--run-dir", str(self.run_dir), "--room", str(self._room)]
        own += ["--hang-after-s", str(hang_after_s)]
        command = [sys.executable, "-m", "paceline", "train", RECIPE, *COMMON, *where, *own]
        with (directory / "out").open("w") as out, (directory / "err").open("w") as err:
            self.launcher = rig.client.popen(command, stdout=out, stderr=err)

    @property
    def out(self) -> str:
        """What it has printed so far."""
        return (self._directory / "out").read_text()

    @property
    def err(self) -> str:
        """What it has said on stderr so far."""
        return (self._directory / "err").read_text()

    def reach_gate(self, attempt: int, gate: int = 1) -> None:
        """Wait until the workers of an attempt stand at a gate, in the middle of a step."""
        self.wait_for((self._room / f"reached-{attempt}-{gate}").exists)

    def open_gate(self, attempt: int, gate: int = 1) -> None:
        """Let the workers of an attempt go on to its next gate."""
        (self._room / f"open-{attempt}-{gate}").touch()

    def open_all(self) -> None:
        """Let the workers of every attempt go on to the end."""
        (self._room / "open").touch()

    def raise_on_rank_1(self) -> None:
        """Have rank 1 raise at its next batch."""
        (self._room / "boom").touch()

    def wait_for(self, condition: Callable[[], bool], limit_s: float = _LIMIT_S) -> None:
        """Poll a condition, as long as the training runs.

        Raises:
            AssertionError: It didn't come true; with what the training said.
        """
        with suppress(TimeoutError):
            until(lambda: condition() or self.launcher.poll() is not None, limit_s)
        assert condition(), f"exit code {self.launcher.poll()}\n{self.out}\n{self.err}"

    def finish(self) -> int:
        """Wait for the end and give the exit code."""
        return self.launcher.wait(patient(_LIMIT_S))

    def sha256(self) -> object:
        """Hash of the final weights."""
        return summary(self.run_dir)["weights_sha256"]


def summary(run_dir: Path) -> Mapping[str, object]:
    """Read summary.json."""
    content: dict[str, object] = json.loads((run_dir / "summary.json").read_text())
    return content


def worker_on(host: Machine) -> psutil.Process:
    """Find the one worker on a host: the fork of a fork server."""
    forks = [p for p in host.processes() if _is_fork(p) and _is_fork(p.parent())]
    (worker,) = forks
    return worker


def _is_fork(process: psutil.Process | None) -> bool:
    return process is not None and "forkserver" in " ".join(process.cmdline())


def train_alone(directory: Path) -> object:
    """Train in one undisturbed process. Returns the hash of the weights."""
    room, run_dir = directory / "room", directory / "run"
    room.mkdir(parents=True)
    (room / "open").touch()
    own = ["--run-dir", str(run_dir), "--room", str(room), "--on", "here"]
    command = [sys.executable, "-m", "paceline", "train", RECIPE, *COMMON, *own]
    subprocess.run(
        command, check=True, capture_output=True, timeout=patient(_LIMIT_S), env=login_environment()
    )
    return summary(run_dir)["weights_sha256"]
