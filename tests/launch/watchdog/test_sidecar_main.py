"""Workers that something else has started, watched by one process a node; without torch."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from paceline.launch.heartbeat import StepNote, read_note
from paceline.launch.watchdog import sidecar
from paceline.launch.watchdog.hang_detector import HangLimits
from paceline.launch.watchdog.sidecar import WatchedWorkers, watched
from tests.launch.waiting import patient, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="on Linux alone")

_WORKER = """
import os, signal, sys, time
from paceline.launch.watchdog.sidecar import WatchedWorkers, watched
from paceline.launch.heartbeat import StepNote

party = WatchedWorkers.from_json(sys.argv[1])
starts, steps = sys.argv[2] == "True", int(sys.argv[3])
note = StepNote()
with watched(note, party, starts=starts):
    for step in range(1, steps):
        note.begin(step)
        if step == 100 and party.rank == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
        note.enter("gradients")
        while step > 100 and party.rank != 3:
            time.sleep(0.1)  # in this collective, for rank 3
        note.leave()
        note.count(1, 0.01, 0.0, 0.0)
        time.sleep(0.01)
"""
_LIMIT_S = 60.0
Start = Callable[[int, int, Path, int], subprocess.Popen[str]]


def alone(log_dir: Path) -> WatchedWorkers:
    return WatchedWorkers(
        log_dir=log_dir,
        rank=0,
        workers=2,
        world_size=2,
        node=0,
        attempt=0,
        limits=HangLimits(),
    )


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def run(rank: int, world_size: int, log_dir: Path, steps: int) -> subprocess.Popen[str]:
        party = WatchedWorkers(
            log_dir=log_dir,
            rank=rank,
            workers=2,
            world_size=world_size,
            node=rank // 2,
            attempt=1,
            limits=HangLimits(least_s=0.8),
        )
        words = [party.to_json(), str(rank % 2 == 0), str(steps)]
        process = subprocess.Popen(
            [sys.executable, "-c", _WORKER, *words], stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def _ended(workers: Sequence[subprocess.Popen[str]]) -> list[str]:
    """Wait until all have ended, and what watched them; give what was said on each's stderr."""
    return [worker.communicate(timeout=patient(_LIMIT_S))[1] for worker in workers]


def test_a_hang_on_one_of_two_nodes_is_told_of_once_and_ended_on_both(
    start: Start, tmp_path: Path
) -> None:
    workers = [start(rank, 4, tmp_path, 10_000) for rank in range(4)]
    said = _ended(workers)
    assert [worker.returncode for worker in workers] == 4 * [-signal.SIGKILL]
    assert said[0].count("The training hangs") == 1
    assert "Missing is rank 3 on" in said[0]
    assert all(f"rank {rank} on" in said[0] for rank in range(3))
    assert said[0].count('File "<string>"') == 0  # the others in a line each
    assert (tmp_path / "hang-1.txt").read_text().count("while step > 100") == 0
    assert (tmp_path / "hang-1.txt").read_text().count('File "<string>"') >= 3
    assert said[1:] == ["", "", ""]
    assert {path.name for path in tmp_path.iterdir()} == {
        "hang-1.txt",
        "failure-rank-3.json",
        *(f"rank-{rank}.log" for rank in range(4)),
    }


def test_a_node_that_doesnt_see_the_others_judges_its_own_workers(
    start: Start, tmp_path: Path
) -> None:
    for node in (0, 1):
        (tmp_path / str(node)).mkdir()
    workers = [start(rank, 4, tmp_path / str(rank // 2), 10_000) for rank in range(4)]
    guilty, waiting = workers[2:], workers[:2]
    said = _ended(guilty)
    assert "Missing is rank 3 on" in said[0]
    assert "rank 2 on" in said[0]
    assert [worker.returncode for worker in guilty] == 2 * [-signal.SIGKILL]
    for worker in waiting:
        worker.kill()


def test_nothing_is_left_where_nothing_hangs(start: Start, tmp_path: Path) -> None:
    workers = [start(rank, 2, tmp_path, 50) for rank in range(2)]
    until(lambda: bool(psutil.Process(workers[0].pid).children()))
    (watching,) = psutil.Process(workers[0].pid).children()
    assert _ended(workers) == ["", ""]
    assert [worker.returncode for worker in workers] == [0, 0]
    assert not watching.is_running()
    assert {path.name for path in tmp_path.iterdir()} == {"rank-0.log", "rank-1.log"}


def test_a_watching_process_ends_with_its_worker(start: Start, tmp_path: Path) -> None:
    workers = [start(rank, 2, tmp_path, 10_000) for rank in range(2)]
    until(lambda: bool(psutil.Process(workers[0].pid).children()))
    (watching,) = psutil.Process(workers[0].pid).children()
    for worker in workers:
        worker.kill()
    _ended(workers)
    until(lambda: not watching.is_running())


_IGNORES = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(flush=True)
time.sleep(60)
"""


def test_a_watching_process_that_takes_long_to_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine: a finished training must not fail for it."""
    busy = subprocess.Popen([sys.executable, "-c", _IGNORES], stdout=subprocess.PIPE)
    monkeypatch.setattr(sidecar, "_start", lambda watch: busy)
    monkeypatch.setattr(sidecar, "_END_S", 0.1)
    with busy, watched(StepNote(), alone(tmp_path), starts=True):
        assert busy.stdout is not None
        busy.stdout.readline()
    assert busy.returncode == -signal.SIGKILL


def test_a_note_that_a_launcher_reads_isnt_watched_from_beside(tmp_path: Path) -> None:
    before = psutil.Process().children()
    note = StepNote()
    note.share(tmp_path / "note")
    with watched(note, alone(tmp_path), starts=True):
        note.begin(3)
        assert psutil.Process().children() == before
    assert read_note(tmp_path / "note").step == 3
    assert [path.name for path in tmp_path.iterdir()] == ["note"]
