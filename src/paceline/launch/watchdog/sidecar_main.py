"""The process that watches the workers of one node which something else has started."""

import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import final

import psutil

from paceline.launch.errors.error_records import record
from paceline.launch.watchdog.driver import Observation, Watchdog, poll_every_s
from paceline.launch.watchdog.peer_status import PeerStatus
from paceline.launch.watchdog.sidecar import Notice, WatchedWorkers, notice_path
from paceline.launch.watchdog.stack_dump import collect_stacks
from paceline.launch.watchdog.worker_poller import WorkerPoller
from paceline.launch.watchdog.worker_state import WorkerState

_EXCHANGES = 5
"""In which the other nodes' processes may find the hang as well, and publish their stacks."""
_NICENESS = 5


def main(arguments: Sequence[str]) -> int:
    """Watch until the worker that started this process ends, or asks for the end by SIGTERM."""
    parent, watched = int(arguments[0]), WatchedWorkers.from_json(arguments[1])
    ended = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        ended.set()

    signal.signal(signal.SIGTERM, end)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a Ctrl-C is the workers' business
    with suppress(OSError):
        os.nice(_NICENESS)
    NodeWatchdog(watched, parent, ended).run()
    return 0


@final
class NodeWatchdog:
    """Watches over the workers of one node."""

    def __init__(self, watched: WatchedWorkers, parent: int, ended: threading.Event) -> None:
        """Create the node watchdog.

        Args:
            watched: The workers.
            parent: The worker with which the watch ends.
            ended: Set when it is to end.
        """
        self._watched = watched
        self._parent = parent
        self._ended = ended
        self._every_s = poll_every_s(watched.limits)
        self._peers = PeerStatus(watched.log_dir, watched.rank, watched.attempt)
        self._notices: dict[int, Notice] = {}
        self._poller = WorkerPoller({}, {})
        self._others: list[WorkerState] = []
        """Workers of other nodes, by their last status."""

    def run(self) -> None:
        """Find the workers, and watch them until one hang or the end."""
        watched = self._watched
        watchdog = Watchdog(self, watched.limits, watched.log_dir, watched.attempt, _print_line)
        try:
            # Wait until all workers of the node have left their notices.
            while self._wait() and not self._find():
                pass
            self._poller = WorkerPoller(
                {rank: Path(notice.note) for rank, notice in self._notices.items()},
                {rank: notice.pid for rank, notice in self._notices.items()},
            )
            # Watch. A hang is recorded before the kill, which ends the watch as well.
            while self._notices and self._wait():
                failures = watchdog.advance()
                if failures is not None:
                    for failure in failures:
                        record(failure, watched.log_dir)
                    self._kill()
                    return
        finally:
            # A worker that was killed can't remove its notice itself.
            self._peers.leave()
            for rank in self._notices:
                notice_path(watched.log_dir, rank).unlink(missing_ok=True)

    def poll(self) -> Observation:
        """Read the workers' states, and exchange them with the other nodes' processes."""
        states = self._poller.poll()
        # Other nodes have workers too: exchange states with their processes by files.
        if self._watched.world_size != len(states):
            self._peers.publish(states, None)
            self._others = self._peers.read()[0]
        return self._observation(states)

    def examine(self, *, first: bool) -> tuple[Observation, Mapping[int, str]]:
        """Collect the stacks of all nodes."""
        stacks = collect_stacks(self._poller.poll(), self._watched.log_dir)
        states = self._poller.poll()
        stacks |= self._peers_stacks(states, stacks)
        return self._observation(states), stacks

    def _observation(self, states: Sequence[WorkerState]) -> Observation:
        unseen = self._watched.world_size - len(states) - len(self._others)
        return Observation(own=states, others=self._others, unseen=unseen)

    def _wait(self) -> bool:
        return not self._ended.wait(self._every_s) and os.getppid() == self._parent

    def _find(self) -> bool:
        """Read the workers' notices; tell whether all of this node are there."""
        # The worker's own notice defines host, node and attempt; those of earlier attempts differ.
        own = Notice.read(notice_path(self._watched.log_dir, self._watched.rank))
        for path in self._watched.log_dir.glob(".watch-rank-*.json"):
            notice = Notice.read(path)
            if own is None or notice is None or notice.place != own.place:
                continue
            if psutil.pid_exists(notice.pid):
                self._notices[int(path.stem.rpartition("-")[2])] = notice
        return len(self._notices) >= self._watched.workers

    def _peers_stacks(
        self, states: Sequence[WorkerState], stacks: Mapping[int, str]
    ) -> dict[int, str]:
        """Wait for what the other nodes' processes find; they leave when they have published it."""
        merged: dict[int, str] = {}
        for _ in range(_EXCHANGES if self._others else 0):
            # Published each time: a file whose number doesn't grow counts as stale.
            self._peers.publish(states, stacks)
            others, published, complete = self._peers.read()
            merged |= published
            if not others:
                break
            self._others = others
            if complete or not self._wait():
                break
        return merged

    def _kill(self) -> None:
        """Kill this node's workers, stopped ones as well; what started them decides what follows.

        The worker that started this process comes last: without it the watch is over.
        """
        pids = [notice.pid for notice in self._notices.values()]
        for pid in sorted(pids, key=lambda pid: pid == self._parent):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
