"""A training over hosts whose workers are started one by one, as by hand on terminals."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.hosts.rig import Rig
from tests.launch.waiting import patient, until

PORT = 23456
_LIMIT_S = 60.0


class ByHand:
    """One worker on each host of a rig, rank by rank; the rank is the host's number."""

    def __init__(self, rig: Rig, run_dir: Path, *options: str) -> None:
        """Start them all; the run directory is on a file system that they share."""
        self.run_dir = run_dir
        self._logs = [rig.client.directory / f"worker-{n}" for n in range(len(rig.hosts))]
        meeting = ["--init-method", f"tcp://{rig.host(0).address}:{PORT}"]
        common = [
            *meeting,
            "--threads",
            "1",
            "--world-size",
            str(len(rig.hosts)),
            "--run-dir",
            str(run_dir),
        ]
        command = [sys.executable, "-m", "paceline", "train", "digits", *common, *options]
        self._workers = []
        for rank, (host, log) in enumerate(zip(rig.hosts, self._logs, strict=True)):
            with log.open("w") as output:
                words = [*command, "--rank", str(rank)]
                self._workers.append(host.popen(words, stdout=output))

    @property
    def workers(self) -> Sequence["subprocess.Popen[str]"]:
        """The workers by rank."""
        return self._workers

    def said(self, rank: int) -> str:
        """Give what a worker has printed so far."""
        return self._logs[rank].read_text()

    def wait_for_epoch(self) -> None:
        """Wait for the end of the first epoch, or of a worker."""
        metrics = self.run_dir / "metrics.csv"
        until(lambda: self._ended() or (metrics.exists() and metrics.read_text().count("\n") > 1))
        assert not self._ended(), "\n".join(map(self.said, range(len(self._workers))))

    def codes(self) -> list[int]:
        """Wait for all to end, and give their exit codes by rank."""
        return [worker.wait(patient(_LIMIT_S)) for worker in self._workers]

    def _ended(self) -> bool:
        return any(worker.poll() is not None for worker in self._workers)
