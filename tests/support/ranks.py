"""Runs plain SPMD code on several forked workers: fast, and the first failure reaches the test."""

import faulthandler
import os
import pickle
import selectors
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import NoReturn, TypeVar, TypeVarTuple

import torch
import torch._dynamo  # DistributedDataParallel imports it, once here rather than in every rank
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from paceline.distributed.group import Group
from paceline.distributed.placement import Placement
from paceline.launch.errors.failures import is_lost_peer
from paceline.launch.process_tree import die_with_parent
from tests.launch.waiting import patient

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

LIMIT_S = 120.0
_LAST_WORDS_S = 2.0
_CPU = torch.device("cpu")


class RankError(AssertionError):
    """A rank failed; the message is its whole traceback."""


@dataclass(frozen=True, kw_only=True)
class _Report:
    """What a rank says at its end, through a pipe that only it and the test hold."""

    rank: int
    time_s: float = field(default_factory=time.monotonic)
    value: object = None
    traceback: str | None = None


@dataclass(kw_only=True)
class _Rank:
    rank: int
    pid: int
    pipe: int
    received: bytes = b""

    def report(self) -> _Report:
        if self.received:
            report: _Report = pickle.loads(self.received)
            return report
        _, status = os.waitpid(self.pid, 0)  # its end of the pipe is closed: it has ended
        how = f"it ended without a word (wait status {status})"
        return _Report(rank=self.rank, traceback=how)


def run_ranks(
    world_size: int, body: Callable[[Group, *Ts], T], *args: *Ts, limit_s: float = LIMIT_S
) -> list[T]:
    """Run `body(group, *args)` on every rank, each a forked process, and collect what it returns.

    With one rank the group's collectives are the identity and torch has no process group, as in a
    training on one worker.

    Raises:
        RankError: A rank raised; the one that did so first is shown.
        TimeoutError: The ranks took longer than `limit_s`; says where each of them stands.
    """
    torch.set_num_threads(1)  # a pool of OpenMP threads doesn't survive a fork
    with tempfile.TemporaryDirectory() as scratch:
        store = Path(scratch) / "store"
        ranks = [_fork(rank, world_size, store, body, args) for rank in range(world_size)]
        try:
            reports = _collect(ranks, limit_s, Path(scratch))
        finally:
            _end(ranks)
    return [report.value for report in reports]  # type: ignore[misc]  # what `body` returned


@contextmanager
def group_of(rank: int, world_size: int, store: Path) -> Iterator[Group]:
    """Join a Gloo group over loopback by a file store, for the length of a test."""
    placement = Placement(
        rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size
    )
    if world_size == 1:
        yield Group(placement, _CPU, "gloo")
        return
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    shared = FileStore(str(store), world_size)
    dist.init_process_group(
        "gloo",
        store=shared,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=patient(LIMIT_S)),
    )
    try:
        dist.barrier()  # a rank that is done at once must not leave while others still connect
        yield Group(placement, _CPU, "gloo")
        _wait_for_all(shared, world_size)
    finally:
        if dist.is_initialized():  # a test of joining and leaving has left it already
            dist.destroy_process_group()


def _wait_for_all(store: FileStore, world_size: int) -> None:
    """Stay until all ranks are done: one that leaves ends what others still connect or receive.

    By the store, since what a test did to the group may leave no collective in order.
    """
    if store.add("done", 1) == world_size:
        store.set("all are done", "")
    store.wait(["all are done"], timedelta(seconds=patient(LIMIT_S)))


def mapped_files() -> set[str]:
    """Name the files in /dev/shm that are this process's memory."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line[line.index("/dev/shm/") :] for line in lines if "/dev/shm/" in line}


def _fork(
    rank: int,
    world_size: int,
    store: Path,
    body: Callable[[Group, *Ts], T],
    args: tuple[*Ts],
) -> _Rank:
    sys.stdout.flush()
    sys.stderr.flush()
    parent, (reading, writing) = os.getpid(), os.pipe()
    with warnings.catch_warnings():
        # Python 3.12+ warns of forking while there are threads; xdist's own hold no locks of ours.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        os.close(reading)
        faulthandler.enable((store.parent / f"stacks-{rank}").open("w"), all_threads=True)
        _be_rank(rank, world_size, store, body, args, writing, parent)
    os.close(writing)
    return _Rank(rank=rank, pid=pid, pipe=reading)


def _be_rank(
    rank: int,
    world_size: int,
    store: Path,
    body: Callable[[Group, *Ts], T],
    args: tuple[*Ts],
    pipe: int,
    parent: int,
) -> NoReturn:
    """Run the body and leave at once: the test runner's own clean-up is not this process's."""
    die_with_parent(parent)
    # The first to compute after a fork renews torch's pool of threads, and of two at once one finds
    # none ("Invalid thread pool").
    torch.set_num_threads(1)
    try:
        with group_of(rank, world_size, store) as group:
            try:
                value = body(group, *args)
            except BaseException:  # noqa: BLE001 - as below
                # Said before the group is left, since the others fail when it is.
                _say(pipe, _Report(rank=rank, traceback=traceback.format_exc()))
        _say(pipe, _Report(rank=rank, value=value))
    except BaseException:  # noqa: BLE001 - the process ends here; the test raises it
        _say(pipe, _Report(rank=rank, traceback=traceback.format_exc()))
    os._exit(1)


def _say(pipe: int, report: _Report) -> NoReturn:
    content = pickle.dumps(report)
    with open(pipe, "wb") as file:
        file.write(content)  # the end of the file comes before the sockets of the group close
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _collect(ranks: list[_Rank], limit_s: float, scratch: Path) -> list[_Report]:
    """Read all reports; after a failure the others aren't waited for.

    Unless it only says that another rank went away: that one has a moment to say why.
    """
    deadline_s = time.monotonic() + patient(limit_s)
    reports: dict[int, _Report] = {}
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            selector.register(rank.pipe, selectors.EVENT_READ, rank)
        while selector.get_map():
            ready = selector.select(deadline_s - time.monotonic())
            if not ready and (failed := _failed(reports)):
                raise _first(failed)
            if not ready:
                missing = [rank for rank in ranks if rank.rank not in reports]
                stacks = "\n".join(_stacks(rank, scratch) for rank in missing)
                numbers = [rank.rank for rank in missing]
                raise TimeoutError(f"ranks {numbers} were not done after {limit_s:g} s\n{stacks}")
            for key, _ in ready:
                ended = _read(key.data)
                if ended is not None:
                    selector.unregister(key.fd)
                    reports[ended.rank] = ended
            if causes := [report for report in _failed(reports) if not _misses_another(report)]:
                raise _first(causes)
            if _failed(reports):
                deadline_s = min(deadline_s, time.monotonic() + patient(_LAST_WORDS_S))
    if failed := _failed(reports):
        raise _first(failed)
    return [reports[rank.rank] for rank in ranks]


def _read(rank: _Rank) -> _Report | None:
    chunk = os.read(rank.pipe, 1 << 20)
    rank.received += chunk
    return None if chunk else rank.report()


def _failed(reports: dict[int, _Report]) -> list[_Report]:
    return [report for report in reports.values() if report.traceback is not None]


def _misses_another(report: _Report) -> bool:
    name, _, text = (report.traceback or "").strip().rpartition("\n")[2].partition(": ")
    return is_lost_peer(name.rpartition(".")[2], text)


def _first(failed: list[_Report]) -> RankError:
    first = min(failed, key=lambda report: report.time_s)
    return RankError(f"rank {first.rank} failed:\n{first.traceback}")


def _stacks(rank: _Rank, scratch: Path) -> str:
    """End a rank that hangs and give the Python stacks that it wrote while it ended."""
    os.kill(rank.pid, signal.SIGABRT)
    os.waitpid(rank.pid, 0)
    stacks, *_ = (scratch / f"stacks-{rank.rank}").read_text().split(" in _be_rank")
    return f"rank {rank.rank}: {stacks}"


def _end(ranks: list[_Rank]) -> None:
    for rank in ranks:
        os.close(rank.pipe)
        try:
            os.kill(rank.pid, signal.SIGKILL)
            os.waitpid(rank.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            continue  # it has ended and been waited for
