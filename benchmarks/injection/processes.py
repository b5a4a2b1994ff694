"""Faults that are signals: to workers, the launcher, all; at a step, a start, the end."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.injection.inside import SYNCING
from benchmarks.injection.kind import (
    STARTS_AGAIN,
    STOPPED,
    STOPPED_EARLY,
    Act,
    Kind,
    stop_orderly,
    struck,
)
from benchmarks.injection.training import Training

_KILLS = r"killed by {name}.*" + STARTS_AGAIN
_LOST_SERVER = _KILLS.format(name="SIGKILL") + "|fork server"
_SOON_S = "6"


def _worker(number: int) -> Act:
    return lambda training: training.signal(number, training.worker())


def _rank_0(number: int) -> Act:
    def strike(training: Training) -> None:
        training.worker()
        training.signal(number, training.workers()[0])

    return strike


def _all_workers(number: int) -> Act:
    def strike(training: Training) -> None:
        training.worker()
        training.signal(number, *training.workers())

    return strike


def _two_workers(training: Training) -> None:
    training.worker()
    training.signal(signal.SIGKILL, *training.workers()[-2:])


def _launcher(number: int) -> Act:
    return lambda training: training.signal(number, training.launcher)


def _group(number: int) -> Act:
    def strike(training: Training) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(training.launcher, number)

    return strike


def _fork_server(number: int) -> Act:
    return lambda training: training.signal(number, training.fork_server())


def _worker_and_launcher(training: Training) -> None:
    training.signal(signal.SIGKILL, training.worker())
    training.signal(signal.SIGTERM, training.launcher)


def _worker_and_fork_server(training: Training) -> None:
    server, worker = training.fork_server(), training.worker()
    training.signal(signal.SIGKILL, server, worker)


def _twice(training: Training) -> None:
    training.signal(signal.SIGINT, training.launcher)
    training.release()
    time.sleep(0.6)  # signals within half a second count as one
    with contextlib.suppress(ProcessLookupError):
        os.kill(training.launcher, signal.SIGINT)


def _frozen(whom: Callable[[Training], Sequence[int]]) -> Act:
    def strike(training: Training) -> None:
        frozen = whom(training)
        training.signal(signal.SIGSTOP, *frozen)
        time.sleep(0.5 + training.drawn.delay_s)
        training.signal(signal.SIGCONT, *frozen)

    return strike


def _watch_closely(training: Training) -> None:
    training.options += ["--hang-after-s", _SOON_S]


# At a start: no step marks the moment.


def _at_the_start(name: str, strike: Act, codes: tuple[int, ...], says: str = "") -> Kind:
    def play(training: Training) -> None:
        _begin_and_strike(training, strike)
        training.end(codes, says)

    return Kind(name=name, play=play, codes=codes, says=says)


def _at_a_resume(name: str, strike: Act, codes: tuple[int, ...], says: str = "") -> Kind:
    def play(training: Training) -> None:
        stop_orderly(training)
        _begin_and_strike(training, strike)
        training.end(codes, says)

    return Kind(name=name, play=play, codes=codes, says=says)


def _begin_and_strike(training: Training, strike: Act) -> None:
    """Start, and strike up to 1.5 s after the launcher has taken the run directory."""
    lock = training.run_dir / "run.lock"
    training.start(held=False)
    training.until(lambda: f"process {training.launcher} " in _text(lock), "the lock")
    time.sleep(training.drawn.delay_s)
    strike(training)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


# In the middle of a snapshot's or another file's way to the disk.


def _while_writing(name: str, strike: Act, codes: tuple[int, ...], says: str) -> Kind:
    def play(training: Training) -> None:
        syncing = training.room / SYNCING
        syncing.mkdir()
        number = training.random.randint(1, 30)
        training.start(held=False)
        training.until(lambda: sum(1 for _ in syncing.iterdir()) >= number, f"fsync {number}")
        strike(training)
        for path in (*syncing.iterdir(), syncing):
            path.unlink() if path.is_file() else path.rmdir()
        training.end(codes, says)

    return Kind(name=name, play=play, codes=codes, says=says)


# While the report is written: the workers are done.


def _at_the_report(name: str, strike: Act, codes: tuple[int, ...], says: str) -> Kind:
    def play(training: Training) -> None:
        summary = training.run_dir / "summary.json"
        training.start(held=False)
        training.until(summary.exists, "the summary")
        time.sleep(training.drawn.delay_s / 5)
        strike(training)
        training.end(codes, says)

    return Kind(name=name, play=play, codes=codes, says=says)


def _crash(name: str) -> Kind:
    number = signal.Signals[name]
    return struck(f"{name} to a worker", _worker(number), says=_KILLS.format(name=name), codes=(0,))


_ENDED = "Finished|Stopped"

KINDS: Sequence[Kind] = (
    *map(_crash, ("SIGKILL", "SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE")),
    struck("SIGTERM to a worker", _worker(signal.SIGTERM), codes=(75,), says=STOPPED),
    struck("SIGINT to a worker", _worker(signal.SIGINT)),
    struck("SIGHUP to a worker", _worker(signal.SIGHUP), codes=(0, 75)),
    struck("SIGUSR1 to a worker", _worker(signal.SIGUSR1)),
    struck(
        "SIGSTOP to a worker",
        _worker(signal.SIGSTOP),
        before=_watch_closely,
        says=r"The training hangs.*Missing is rank.*" + STARTS_AGAIN,
        least_workers=2,
    ),
    struck("a worker frozen for a moment", _frozen(lambda t: [t.worker()])),
    struck("SIGKILL to rank 0", _rank_0(signal.SIGKILL), says=_KILLS.format(name="SIGKILL")),
    struck("SIGTERM to all workers", _all_workers(signal.SIGTERM), codes=(75,), says=STOPPED),
    struck(
        "SIGKILL to all workers", _all_workers(signal.SIGKILL), says=_KILLS.format(name="SIGKILL")
    ),
    struck(
        "SIGKILL to two workers at once",
        _two_workers,
        says=_KILLS.format(name="SIGKILL"),
        least_workers=3,
    ),
    struck("SIGTERM to the launcher", _launcher(signal.SIGTERM), codes=(75,), says=STOPPED),
    struck("SIGINT to the launcher", _launcher(signal.SIGINT), codes=(75,), says=STOPPED),
    struck("SIGHUP to the launcher", _launcher(signal.SIGHUP), codes=(75,), says=STOPPED),
    struck("SIGINT twice to the launcher", _twice, codes=(75,), says=STOPPED),
    struck("SIGKILL to the launcher", _launcher(signal.SIGKILL), codes=(-9,)),
    struck("SIGSEGV to the launcher", _launcher(signal.SIGSEGV), codes=(-11,)),
    struck("the launcher frozen for a moment", _frozen(lambda t: [t.launcher])),
    struck("SIGINT to the whole group", _group(signal.SIGINT), codes=(75,), says=STOPPED),
    struck("SIGTERM to the whole group", _group(signal.SIGTERM), codes=(75,), says=STOPPED),
    struck("SIGHUP to the whole group", _group(signal.SIGHUP), codes=(75,), says=STOPPED),
    struck("SIGKILL to the whole group", _group(signal.SIGKILL), codes=(-9,)),
    struck("the whole group frozen for a moment", _frozen(lambda t: [t.launcher, *t.workers()])),
    struck(
        "SIGKILL to the fork server",
        _fork_server(signal.SIGKILL),
        says=_LOST_SERVER,
        codes=(0, 70),
    ),
    struck("SIGTERM to the fork server", _fork_server(signal.SIGTERM)),
    struck(
        "SIGKILL to a worker, SIGTERM to the launcher",
        _worker_and_launcher,
        codes=(75,),
        says=STOPPED,
    ),
    struck(
        "SIGKILL to a worker and the fork server",
        _worker_and_fork_server,
        says=_LOST_SERVER,
        codes=(0, 70),
    ),
    _at_the_start("SIGKILL to the launcher at its start", _launcher(signal.SIGKILL), (-9,)),
    _at_the_start(
        "SIGTERM to the launcher at its start", _launcher(signal.SIGTERM), (75,), STOPPED_EARLY
    ),
    _at_the_start("SIGINT to the group at its start", _group(signal.SIGINT), (75,), STOPPED_EARLY),
    _at_a_resume("SIGKILL to the launcher at a resume", _launcher(signal.SIGKILL), (-9,)),
    _at_a_resume("SIGTERM to the launcher at a resume", _launcher(signal.SIGTERM), (75,), STOPPED),
    _at_a_resume("SIGKILL to the group at a resume", _group(signal.SIGKILL), (-9,)),
    _while_writing(
        "SIGKILL to the launcher while a file is written", _launcher(signal.SIGKILL), (-9,), ""
    ),
    _while_writing(
        "SIGKILL to rank 0 while a file is written",
        _rank_0(signal.SIGKILL),
        (0,),
        _KILLS.format(name="SIGKILL"),
    ),
    _while_writing(
        "SIGTERM to the launcher while a file is written",
        _launcher(signal.SIGTERM),
        (75,),
        STOPPED,
    ),
    _at_the_report("SIGTERM during the report", _launcher(signal.SIGTERM), (0, 75), _ENDED),
    _at_the_report("SIGINT during the report", _launcher(signal.SIGINT), (0, 75), _ENDED),
    _at_the_report("SIGKILL during the report", _launcher(signal.SIGKILL), (0, -9), ""),
)
