"""A training about to start: what is trained, with which options, and where its workers run."""

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from paceline.distributed.placement import NodePlacement
from paceline.launch.ssh.options import HostsOptions
from paceline.results.run_directory import RunDirectory
from paceline.training.config import TrainConfig, TrainRequest

_ENTRIES = {
    "recipe": "paceline.training.worker:run_training",
    "script": "paceline.script.entry:run_script",
}
# Every optimizer imports torch._dynamo when it is built: here it is done once, for all workers.
PRELOAD = ("paceline.training.worker", "torch._dynamo")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the workers of this training run."""

    here: bool
    """This process is a worker: torchrun (or the like) has started it, or the user asked for it."""
    rank: int = 0
    local_rank: int = 0
    workers: int = 1
    """Of this node, or of all where `here`."""
    threads: int = 1
    attempt: int = 0
    node: NodePlacement | None = None
    """This node's place, where each of several nodes starts its own workers."""
    hosts: HostsOptions | None = None
    """Hosts to reach by ssh; each then chooses its own workers."""
    started_apart: bool = False
    """Nobody has started all workers together: they agree on the run directory when they meet."""

    def started_at(self) -> datetime:
        """When the training was started; the same for all workers of a node."""
        return started_by()[1] if self._has_starter else datetime.now(UTC)

    def starter(self) -> str:
        """What has started the workers of this node, the same for all; empty where this process."""
        return started_by()[0] if self._has_starter else ""

    @property
    def _has_starter(self) -> bool:
        return self.here and self.workers > 1


def started_by() -> tuple[str, datetime]:
    """Say what has started this worker, and may start it again after a failure, and when."""
    import psutil

    starter = os.getppid() or os.getpid()  # 0: it is outside of this container
    moment = datetime.fromtimestamp(psutil.Process(starter).create_time(), UTC)
    return f"process {starter} on {socket.gethostname()}", moment


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A training about to start."""

    request: TrainRequest
    config: TrainConfig
    run: RunDirectory
    place: Place
    is_new: bool
    """Whether this begins a training, rather than going on with one."""
    is_named: bool = True
    """Whether the user has named the run directory."""
    paths: tuple[str, ...] = ()
    """Names of the recipe's arguments that are paths."""
    quiet: bool = False
    """Whether the summary isn't printed."""
    settled: Callable[[RunDirectory], object] = id
    """Called once the run directory has got another name than `run`, which others had taken."""

    @property
    def entry(self) -> str:
        """What every worker runs."""
        return _ENTRIES[self.request.kind]

    @property
    def makes(self) -> bool:
        """Whether the run directory is to be made now: nothing has been trained in it yet."""
        return self.is_new and not (self.place.attempt and self.run.run_json.exists())
