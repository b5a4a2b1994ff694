"""One attempt: torch's elastic agent starts the workers and watches them. Imports torch.

Each attempt has an agent and a store of its own: a store shared by attempts would hand workers the
addresses of dead peers (the agent's own restarts do that, so they are switched off). On one machine
it is a file that nobody else may open: a port would be open to every user of the machine.
"""

import logging
import multiprocessing
import socket
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, final

from torch.distributed import (  # type: ignore[attr-defined]  # not declared
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from paceline.errors import InfrastructureError
from paceline.launch.errors.failures import WorkerExits
from paceline.launch.heartbeat import read_note
from paceline.launch.local.worker import NodeRendezvous, WorkerTask, note_path, result_path, work
from paceline.launch.processes import Worker, WorkerSupervisor
from paceline.launch.signals import InterruptedStartError, Interrupts
from paceline.launch.watchdog.driver import PeriodicThread, Watch
from paceline.launch.watchdog.worker_poller import WorkerPoller

_LOOPBACK = "127.0.0.1"
_STORE_TIMEOUT = timedelta(seconds=60)
_MONITOR_INTERVAL_S = 0.05
_ENDED = "paceline/ended"
_OTHER_NODES_S = 300.0
"""For the other nodes to end theirs, once this node's workers have ended well."""
_TORCH_LOGGERS = ("torch.distributed.elastic", "torch.multiprocessing")


@final
class StaticRendezvous(RendezvousHandler):
    """A rendezvous for one attempt: every node's place in it is known beforehand.

    For one machine alone its workers meet in a file, and the agent needs nobody to talk to.
    """

    def __init__(self, rendezvous: NodeRendezvous | None, attempt: int) -> None:
        self._rendezvous = rendezvous
        self._attempt = attempt
        self._run_id = uuid.uuid4().hex
        self._closed = False
        # MASTER_PORT, which scripts written for torchrun read. Nobody listens there, and while it
        # is bound nobody else can.
        self._reserved = socket.socket()
        if rendezvous is None:
            self._reserved.bind((_LOOPBACK, 0))

    def store_variable(self, scratch: Path) -> tuple[str, str]:
        """Give the variable that tells workers the file in which they meet; empty for none.

        The port stands before it: where another launcher has set another one, it doesn't count.
        """
        port = self._reserved.getsockname()[1]
        file = f"{port}:{scratch / 'store'}" if self._rendezvous is None else ""
        return "PACELINE_STORE", file

    def get_backend(self) -> str:
        """Name it."""
        return "paceline-seats"

    @property
    def use_agent_store(self) -> bool:
        """Workers connect to this store; none of them opens another one."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Open the store."""
        rendezvous = self._rendezvous
        if rendezvous is None:
            port = int(self._reserved.getsockname()[1])
            return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(_LOOPBACK, port))
        store = PrefixStore(
            f"agents/{self._attempt}", _open_store(rendezvous.host, rendezvous.port)
        )
        meeting = RendezvousStoreInfo(rendezvous.host, rendezvous.port)
        return RendezvousInfo(store, rendezvous.node_rank, rendezvous.nodes, meeting)

    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    def set_closed(self) -> None:
        """Close it."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """Nobody else joins an attempt."""
        return 0

    def get_run_id(self) -> str:
        """Give an id that no other training has."""
        return self._run_id

    def shutdown(self) -> bool:
        """Close it; the store goes with the agent."""
        self._closed = True
        self._reserved.close()
        return True


@final
class _PlainLogs(LogsSpecs):
    """Has the agent redirect nothing: workers write their own logs and error records."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Name the files of each local rank in `envs`: none."""
        nothing = dict.fromkeys(envs, "")
        return LogsDest(
            stdouts=nothing, stderrs=nothing, tee_stdouts={}, tee_stderrs={}, error_files=nothing
        )

    @property
    def root_log_dir(self) -> str:
        """Where the agent would keep logs: nowhere."""
        return ""


@final
class _Agent(LocalElasticAgent):
    """The agent, with a supervisor over its workers and without its signal handlers."""

    def __init__(
        self,
        spec: WorkerSpec,
        interrupts: Interrupts,
        task: WorkerTask,
        waits: bool,
        watch: Watch | None,
    ) -> None:
        super().__init__(spec, _PlainLogs(), start_method="forkserver")
        self._watch = watch
        self.watching: PeriodicThread | None = None
        self._interrupts = interrupts
        self._task = task
        self._waits = waits
        self.processes: dict[int, multiprocessing.process.BaseProcess] = {}
        self.supervisor: WorkerSupervisor | None = None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        usual, tempfile.tempdir = tempfile.tempdir, str(self._task.scratch)
        try:  # torch leaves a file in there for each worker that is killed
            pids: dict[int, Any] = super()._start_workers(worker_group)
        except ConnectionError:  # to the fork server, which has ended
            raise
        except OSError as error:
            # Each worker has a queue of torch's, whose locks are files in /dev/shm, and is forked.
            raise InfrastructureError(
                f"no worker can be started here: {error}. Workers need a /dev/shm and a temporary "
                "directory that can be written to, memory, and limits of processes and open files "
                "that aren't reached"
            ) from error
        finally:
            tempfile.tempdir = usual
        # torch sets handlers of its own while it starts processes.
        self._interrupts.install()
        # By torch's private name: `active_children` leaves out those that have ended meanwhile.
        started = self._pcontext._pc.processes  # type: ignore[union-attr]
        self.processes = {w.global_rank: started[w.local_rank] for w in worker_group.workers}
        scratch = self._task.scratch
        notes = {rank: note_path(scratch, rank) for rank in self.processes}
        # No reference back to the agent, which would keep its semaphores until a collection: one
        # within multiprocessing's resource tracker can't remove them (Python 3.11 to 3.13).
        self.supervisor = WorkerSupervisor(
            {rank: Worker(p.pid or 0, p.sentinel) for rank, p in self.processes.items()},
            delivered=lambda rank: result_path(scratch, rank).exists(),
            read=lambda: map(read_note, notes.values()),
            print_line=self._interrupts.print_line,
        )
        # A signal that came during the start reaches the workers now, and later ones directly.
        self._interrupts.pass_on(self.supervisor)
        if self._watch is not None:
            pid_of = {rank: p.pid or 0 for rank, p in self.processes.items()}
            self.watching = self._watch(WorkerPoller(notes, pid_of), self.supervisor.kill)
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state != WorkerState.HEALTHY:
            return result
        return self._ended_by_themselves() or result

    def _ended_by_themselves(self) -> RunResult | None:
        """Find workers that ended with exit code 0, for whose return values torch waits forever.

        Ours return none: those who came to their end have left a result, others called `os._exit`.
        """
        ended = [rank for rank, process in self.processes.items() if process.exitcode == 0]
        if not ended:
            return None
        scratch = self._task.scratch
        delivered = [rank for rank in self.processes if result_path(scratch, rank).exists()]
        # Exit code 0 without a result is a failure.
        early = [rank for rank in ended if rank not in delivered]
        if early:
            pids = {rank: self.processes[rank].pid or 0 for rank in early}
            failures = {rank: ProcessFailure(0, pid, 0, "") for rank, pid in pids.items()}
            return RunResult(state=WorkerState.FAILED, failures=failures)
        if len(ended) == len(self.processes):
            return RunResult(WorkerState.SUCCEEDED, return_values=dict.fromkeys(ended, ""))
        # All results are there, but some process doesn't exit: the supervisor kills it in the end.
        if len(delivered) == len(self.processes) and self.supervisor is not None:
            self.supervisor.limit_exit()
        return None

    def _exit_barrier(self) -> None:
        if self._waits:
            store, nodes = self._store, self._worker_group.group_world_size
            _wait_for_nodes(store, nodes, lambda: self._interrupts.received)  # type: ignore[arg-type]  # torch declares both as None


def _wait_for_nodes(store: Store, nodes: int, stopped: Callable[[], bool]) -> None:
    """Wait until all nodes have come here, by polling: torch's own wait ignores signals.

    Args:
        store: That all nodes see.
        stopped: Asked before every look: whether to give up.
    """
    deadline_s = time.monotonic() + _OTHER_NODES_S
    with suppress(RuntimeError):  # the store is gone, with the node that kept it
        # Each node adds 1 once; adding 0 reads the counter.
        ended = store.add(_ENDED, 1)
        while ended < nodes and not stopped() and time.monotonic() < deadline_s:
            time.sleep(_MONITOR_INTERVAL_S)
            ended = store.add(_ENDED, 0)


def _open_store(host: str, port: int) -> TCPStore:
    """Connect to the store of several nodes, which is kept elsewhere."""
    try:
        return TCPStore(host, port, is_master=False, timeout=_STORE_TIMEOUT, wait_for_workers=False)
    except RuntimeError as error:
        raise InfrastructureError(
            f"{socket.gethostname()} did not reach the store at {host} port {port}: {error}"
        ) from error


def run_attempt(
    task: WorkerTask,
    workers: int,
    interrupts: Interrupts,
    rendezvous: NodeRendezvous | None = None,
    watch: Watch | None = None,
) -> WorkerExits:
    """Start the workers, wait for their end, and tell how they ended.

    A signal that comes before the workers run breaks the start off; after that it is passed on.

    Args:
        task: What each worker does; results and records are left in files.
        rendezvous: This node's place where there are several.

    Raises:
        InfrastructureError: The nodes' store can't be kept, or can't be reached.
    """
    # Prepare: a rendezvous and an agent for this attempt alone.
    meeting = StaticRendezvous(rendezvous, task.attempt)
    variable = meeting.store_variable(task.scratch)
    task = replace(task, environment=(*task.environment, variable))
    spec = WorkerSpec(
        role="paceline",
        local_world_size=workers,
        rdzv_handler=meeting,
        entrypoint=work,
        args=(task,),
        max_restarts=0,
        monitor_interval=_MONITOR_INTERVAL_S,
    )
    waits = rendezvous is not None and rendezvous.ends_together
    agent = _Agent(spec, interrupts, task, waits, watch)
    # Start the workers and wait. `starting` ends as soon as the supervisor guards them.
    result: RunResult | None = None
    try:
        with _quiet_torch(), interrupts.starting():
            result = agent.run()
    except (InterruptedStartError, SignalException):
        interrupts.note_received()
    # However it ended: the port, the watchdog and the supervisor's thread don't outlive it. The
    # watchdog goes first, since it kills by the supervisor.
    finally:
        meeting.shutdown()
        if agent.watching is not None:
            agent.watching.stop()
        if agent.supervisor is not None:
            agent.supervisor.close()
    # Where none was started, ranks are only known if this is the only node.
    known = range(workers) if rendezvous is None and not agent.processes else ()
    codes: dict[int, int | None] = dict.fromkeys(known)
    codes |= {rank: process.exitcode for rank, process in agent.processes.items()}
    failures = {} if result is None else result.failures
    first = next(iter(failures), None)
    if first is not None:
        codes[first] = failures[first].exitcode
    killed = agent.supervisor.killed if agent.supervisor is not None else frozenset[int]()
    return WorkerExits(
        exit_codes=codes,
        first=first,
        stopped=killed,
        pids={rank: process.pid or 0 for rank, process in agent.processes.items()},
        stop_requested=interrupts.received,
    )


@contextmanager
def _quiet_torch() -> Iterator[None]:
    """Silence the agent's own reports: the user gets ours.

    Loggers below these have levels of their own, so what they say is caught where it comes by.
    """
    loggers = [logging.getLogger(name) for name in _TORCH_LOGGERS]
    before = [(logger, logger.level, logger.propagate) for logger in loggers]
    nowhere = logging.NullHandler()
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
        logger.propagate = False
        logger.addHandler(nowhere)
    try:
        yield
    finally:
        for logger, level, propagate in before:
            logger.setLevel(level)
            logger.propagate = propagate
            logger.removeHandler(nowhere)
