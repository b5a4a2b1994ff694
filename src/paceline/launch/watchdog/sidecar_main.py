"""The process that watches the workers of one node which something else has started."""

import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import final

import psutil

from paceline.files import read_json
from paceline.launch.error_records import record
from paceline.launch.watchdog.hang_detector import judge
from paceline.launch.watchdog.live_stats import live_path, remove_live
from paceline.launch.watchdog.local_watchdog import logs_of, look_every_s, tell_speeds, write_report
from paceline.launch.watchdog.peer_status import Comrades
from paceline.launch.watchdog.report import failures_of
from paceline.launch.watchdog.sidecar import WatchedWorkers, notice_path
from paceline.launch.watchdog.stack_dump import collect_stacks
from paceline.launch.watchdog.stragglers import Speeds
from paceline.launch.watchdog.worker_poller import Lookout
from paceline.launch.watchdog.worker_state import WorkerState
from paceline.options.fields import check_types

_HEAR_LOOKS = 5
"""Looks in which the other nodes' processes may find the hang as well, and tell their stacks."""
_NICENESS = 5


def main(arguments: Sequence[str]) -> int:
    """Watch until the worker that started this process ends, or asks for the end by SIGTERM."""
    parent, party = int(arguments[0]), WatchedWorkers.from_json(arguments[1])
    ended = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        ended.set()

    signal.signal(signal.SIGTERM, end)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a Ctrl-C is the workers' business
    with suppress(OSError):
        os.nice(_NICENESS)
    NodeWatch(party, parent, ended).run()
    return 0


@final
class NodeWatch:
    """Watches over the workers of one node."""

    def __init__(self, party: WatchedWorkers, parent: int, ended: threading.Event) -> None:
        """Args:
        party: The workers.
        parent: The worker with which the watch ends.
        ended: Set when it is to end.
        """
        self._party = party
        self._parent = parent
        self._ended = ended
        self._every_s = look_every_s(party.limits)
        self._live = live_path(party.log_dir, f"node-{party.rank}")
        self._comrades = Comrades(party.log_dir, party.rank, party.attempt)
        self._found: dict[int, _Notice] = {}
        self._others: list[WorkerState] = []
        """Workers of other nodes, as last heard of."""

    def run(self) -> None:
        """Find the workers, and watch them."""
        try:
            while self._goes_on() and not self._find():
                pass
            if self._found:
                self._watch()
        finally:
            remove_live(self._live)
            self._comrades.leave()
            for rank in self._found:
                notice_path(self._party.log_dir, rank).unlink(missing_ok=True)

    def _goes_on(self) -> bool:
        return not self._ended.wait(self._every_s) and os.getppid() == self._parent

    def _find(self) -> bool:
        """Read the workers' notices; tell whether all of this node are there."""
        own = _read(notice_path(self._party.log_dir, self._party.rank))
        for path in self._party.log_dir.glob(".watch-rank-*.json"):
            notice = _read(path)
            if own is None or notice is None or notice.place != own.place:
                continue
            if psutil.pid_exists(notice.pid):
                self._found[int(path.stem.rpartition("-")[2])] = notice
        return len(self._found) >= self._party.workers

    def _watch(self) -> None:
        lookout = Lookout(
            {rank: notice.note for rank, notice in self._found.items()},
            {rank: notice.pid for rank, notice in self._found.items()},
        )
        speeds = Speeds()
        while self._goes_on():
            states = lookout.look()
            tell_speeds(speeds, states, self._live, _say)
            if self._hangs(states) and self._end_hang(lookout):
                self._kill()
                return

    def _hangs(self, states: Sequence[WorkerState]) -> bool:
        others = self._exchange(states)
        unseen = self._party.world_size - len(states) - len(others)
        return judge([*states, *others], self._party.limits, unseen) is not None

    def _exchange(self, states: Sequence[WorkerState]) -> list[WorkerState]:
        if self._party.world_size == len(states):
            return []
        self._comrades.publish(states, None)
        self._others = self._comrades.hear()[0]
        return self._others

    def _end_hang(self, lookout: Lookout) -> bool:
        """Tell who hangs where; False where the training went on meanwhile."""
        party, states = self._party, lookout.look()
        stacks = collect_stacks(states, logs_of(party.log_dir, states))
        states = lookout.look()
        stacks |= self._hear_of_others(states, stacks)
        everyone = sorted([*states, *self._others], key=lambda state: state.rank)
        hang = judge(everyone, party.limits, party.world_size - len(everyone))
        if hang is None:
            return False
        path = party.log_dir / f"hang-{party.attempt}.txt"
        if everyone[0].rank == states[0].rank:
            _say(write_report(path, hang, everyone, stacks))
        own = {state.rank for state in states}
        for failure in failures_of(hang, everyone, stacks):
            if failure.rank in own:
                record(failure, party.log_dir)
        return True

    def _hear_of_others(
        self, states: Sequence[WorkerState], stacks: Mapping[int, str]
    ) -> dict[int, str]:
        """Wait for what the other nodes' processes find; they leave when they have told it."""
        heard: dict[int, str] = {}
        for _ in range(_HEAR_LOOKS if self._others else 0):
            self._comrades.publish(states, stacks)
            others, told, complete = self._comrades.hear()
            heard |= told
            if not others:
                break
            self._others = others
            if complete or not self._goes_on():
                break
        return heard

    def _kill(self) -> None:
        """Kill this node's workers, stopped ones as well; what started them decides what follows.

        The worker that started this process comes last: without it the watch is over.
        """
        pids = [notice.pid for notice in self._found.values()]
        for pid in sorted(pids, key=lambda pid: pid == self._parent):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@dataclass(frozen=True)
class _Notice:
    """What a worker has left in the run directory."""

    place: tuple[str, int, int]
    """Host, node and attempt: the same for all workers of a node."""
    pid: int
    note: Path


@dataclass(frozen=True)
class _NoticeRecord:
    """A notice as it is written."""

    host: str
    node: int
    attempt: int
    pid: int
    note: str


def _read(path: Path) -> _Notice | None:
    try:
        found = _NoticeRecord(**check_types(_NoticeRecord, read_json(path)))
    except (OSError, ValueError):
        return None
    return _Notice((found.host, found.node, found.attempt), found.pid, Path(found.note))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
