"""What a test may not leave behind: processes, threads, environment, groups, handlers, files."""

import os
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from paceline.launch.local import forkserver
from tests.launch.waiting import alive

_GRACE_S = 10.0
# Not SIGCHLD: torch's DataLoader puts a handler there with the first loader process, for good.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
# pytest sets the first for each phase of a test, torch the other with the first import of Inductor.
_OTHERS_CHANGE = frozenset({"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"})
# multiprocessing keeps one of these for the life of a process, from the first use of it on.
_LASTING_PROCESS = "multiprocessing.resource_tracker"


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a test finds around it."""

    threads: frozenset[threading.Thread]
    children: frozenset[int]
    environment: Mapping[str, str]
    settings: Mapping[str, object]
    """Everything else that is global, by a name for the message."""
    killed: frozenset[str]
    """Which of the processes that tests share are dead, and nobody has replaced them yet."""


def look_around() -> Surroundings:
    """Note what is there before a test."""
    return Surroundings(
        threads=frozenset(threading.enumerate()),
        children=frozenset(child.pid for child in _children()),
        environment=_environment(),
        settings=_settings(),
        killed=_killed(),
    )


def find_leaks(before: Surroundings, scratch: Path | None) -> list[str]:
    """Say what a test has left behind; threads and processes that are about to end may do so.

    Args:
        before: What was there before the test.
        scratch: The test's own directory, in which no file may be open any more.
    """
    return [
        *(f"thread {thread.name}" for thread in _new_threads(before)),
        *(f"process {child.pid}: {_command(child)}" for child in _new_children(before)),
        *_changes("variable", before.environment, _environment()),
        *_changes("setting", before.settings, _settings()),
        *(f"the {name} that tests share, killed" for name in _killed() - before.killed),
        *(f"open file {path}" for path in _open_files(scratch)),
    ]


def _new_threads(before: Surroundings) -> list[threading.Thread]:
    new = [thread for thread in threading.enumerate() if thread not in before.threads]
    for thread in new:
        thread.join(_GRACE_S)
    return [thread for thread in new if thread.is_alive()]


def _new_children(before: Surroundings) -> list[psutil.Process]:
    new = [c for c in _children() if c.pid not in before.children and not _is_lasting(c)]
    _, alive = psutil.wait_procs(new, timeout=_GRACE_S) if new else ([], [])
    return alive


def _children() -> list[psutil.Process]:
    listed = [*Path("/proc/self/task").glob("*/children")]  # psutil looks at every process there is
    if not listed:
        return psutil.Process().children()
    found = []
    for path in listed:
        with suppress(OSError):  # a thread that has ended meanwhile
            found += [int(word) for word in path.read_text().split()]
    return [psutil.Process(pid) for pid in found if psutil.pid_exists(pid)]


def _is_lasting(process: psutil.Process) -> bool:
    # The interpreter has one fork server, which tests share and which ends with it.
    return process.pid == forkserver.server_pid() or _LASTING_PROCESS in _command(process)


def _killed() -> frozenset[str]:
    tracker: int | None = resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]
    shared = {"fork server": forkserver.server_pid(), "resource tracker": tracker}
    return frozenset(name for name, pid in shared.items() if pid is not None and not alive(pid))


def _command(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return "(gone)"


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _OTHERS_CHANGE}


def _settings() -> dict[str, object]:
    handlers = {f"handler of {number.name}": signal.getsignal(number) for number in _SIGNALS}
    return handlers | {
        "working directory": str(Path.cwd()),
        "sys.path": tuple(sys.path),
        "process group": dist.is_initialized(),
        "torch threads": torch.get_num_threads(),
        "torch gradients": torch.is_grad_enabled(),
        "torch default type": torch.get_default_dtype(),
        "torch default device": torch.get_default_device(),
        "torch deterministic": torch.are_deterministic_algorithms_enabled(),
        "torch sharing": torch.multiprocessing.get_sharing_strategy(),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
    }


def _changes(what: str, before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    names = sorted(before.keys() | after.keys())
    changed = [name for name in names if before.get(name) != after.get(name)]
    return [f"{what} {n}: {before.get(n)!r} became {after.get(n)!r}" for n in changed]


def _open_files(scratch: Path | None) -> list[str]:
    descriptors = Path("/proc/self/fd")
    if scratch is None or not descriptors.is_dir():
        return []
    paths = []
    for descriptor in descriptors.iterdir():
        with suppress(OSError):  # the one that lists the directory is gone by now
            paths.append(str(descriptor.readlink()))
    return [path for path in paths if path.startswith(f"{scratch}{os.sep}")]
