"""Entries that the launch tests run in real workers, imported there by name."""

import gc
import json
import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from paceline.errors import InfrastructureError, JobError, StorageError, UsageError
from paceline.files import write_json
from paceline.launch.heartbeat import note


def _rank() -> int:
    return int(os.environ["RANK"])


def _attempt() -> int:
    return int(os.environ["PACELINE_ATTEMPT"])


def describe(payload: str) -> str:
    """Print on both streams and tell what the worker sees."""
    import torch

    print(f"out of rank {_rank()}: {payload}")
    print(f"err of rank {_rank()}", file=sys.stderr)
    os.write(1, f"raw of rank {_rank()}\n".encode())
    os.write(2, f"noise of rank {_rank()}\n".encode())
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PACELINE_ATTEMPT", "MASTER_ADDR", "MASTER_PORT")
    more = ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "TORCHELASTIC_RUN_ID")
    seen: dict[str, object] = {name: os.environ.get(name) for name in names + more}
    seen |= {"torch_threads": torch.get_num_threads(), "pid": os.getpid()}
    return json.dumps(seen | {"collects": gc.isenabled(), "spared": gc.get_freeze_count()})


def fail(payload: str) -> str:
    """Rank 1 raises what the payload names; the others sleep until they are ended."""
    if _rank() == 1:
        note.step, note.operation = 37, "backward"
        errors = {
            "value": ValueError("a bad value"),
            "usage": UsageError("a bad option"),
            "job": JobError("a bad job"),
            "infrastructure": InfrastructureError("a bad link"),
            "storage": StorageError("a full disk"),
        }
        if payload == "exit":
            os._exit(3)
        if payload == "sys.exit":
            sys.exit(1)
        raise errors[payload]
    time.sleep(60)
    return ""


def spoil(payload: str) -> str:
    """Rank 1 makes the logs' directory unwritable, also for root, and fails."""
    if _rank() == 1:
        note.step = 11
        shutil.rmtree(payload)
        Path(payload).touch()
        raise InfrastructureError("a bad link")
    time.sleep(60)
    return ""


def leave(payload: str) -> str:
    """The ranks that the payload lists end their process with exit code 0; the others wait."""
    note.step, note.operation = 20, "step"
    if str(_rank()) in payload.split():
        os._exit(0)
    signal.signal(signal.SIGTERM, lambda *_: None)
    time.sleep(60)
    return ""


def leave_when_done(payload: str) -> str:
    """Rank 0's process ends with exit code 0 as soon as its result is there."""
    from paceline.launch.local import worker

    def deliver_and_leave(path: Path, result: object) -> None:
        write_json(path, result)
        os._exit(0)

    if _rank() == 0:
        vars(worker)["write_json"] = deliver_and_leave
    return "done"


def outlive(payload: str) -> str:
    """Rank 0 ends when rank 1's process is no more."""
    place = Path(payload)
    if _rank() == 1:
        (place / ".pid").write_text(str(os.getpid()))
        (place / ".pid").rename(place / "pid")
        return "first"
    while not (place / "pid").exists():
        time.sleep(0.01)
    with suppress(psutil.NoSuchProcess):
        peer = psutil.Process(int((place / "pid").read_text()))
        while peer.is_running() and peer.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
    return "last"


def fail_first(payload: str) -> str:
    """Rank 1 is killed in the first attempts, as many as the payload says."""
    note.step = 7
    if _attempt() < int(payload):
        if _rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    return f"attempt {_attempt()}"


def ignore_stop(payload: str) -> str:
    """Rank 1 raises; the others catch SIGTERM as a flag and hang."""
    signal.signal(signal.SIGTERM, lambda *_: None)
    Path(payload, f"ready-{_rank()}-{os.getpid()}").touch()
    if _rank() == 1:
        while not list(Path(payload).glob("ready-0-*")):
            time.sleep(0.01)
        raise ValueError("rank 1 is done for")
    while True:
        time.sleep(60)


def wait_for_stop(payload: str) -> str:
    """Wait for SIGTERM as a trainer does, with a child process; then return."""
    asked: list[int] = []  # an Event's lock could be held where the handler runs
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    if (child := os.fork()) == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(300)
        os._exit(0)
    ready = Path(payload, f".ready-{_rank()}")
    ready.write_text(json.dumps([os.getpid(), child]))
    ready.rename(Path(payload, f"ready-{_rank()}"))
    while not asked:
        time.sleep(0.02)
    return "stopped"


def wait_for_kill(payload: str) -> str:
    """Say that it runs, note a request to stop, and never stop."""
    ready = Path(payload, f"ready-{_rank()}")
    signal.signal(signal.SIGTERM, lambda *_: ready.with_suffix(".asked").touch())
    scratch = Path(payload, f".ready-{_rank()}")
    scratch.write_text(json.dumps([os.getpid()]))
    scratch.rename(ready)
    while True:
        time.sleep(60)


def _join_plainly() -> None:
    """Make a process group as a script of plain PyTorch does."""
    import torch.distributed as dist

    from paceline.distributed.environment import read_environment, store_file
    from paceline.distributed.rendezvous import meet_in_file

    meet_in_file(store_file(read_environment()))
    dist.init_process_group("gloo")


def reduce_in_a_loop(payload: str) -> str:
    """All-reduce until a number of steps; rank 0 publishes each step as the progress."""
    import torch
    import torch.distributed as dist

    directory, steps = json.loads(payload)
    published = Path(directory, "step")
    _join_plainly()
    step = int(published.read_text()) if published.exists() else 0
    total = torch.zeros(())
    Path(directory, f"pid-{_attempt()}-{_rank()}-{os.getpid()}").touch()
    while step < steps:
        note.step, note.operation = step, "all-reduce"
        total = torch.ones(())
        dist.all_reduce(total)
        step += 1
        if _rank() == 0:
            scratch = Path(directory, ".step")
            scratch.write_text(str(step))
            scratch.replace(published)
        time.sleep(0.002)
    listening = _listening()
    dist.destroy_process_group()
    return json.dumps({"step": step, "sum": total.item(), "listening": listening})


def _listening() -> list[str]:
    import psutil

    connections = psutil.Process().net_connections("inet")
    return [str(c.laddr.ip) for c in connections if c.status == psutil.CONN_LISTEN]


def crash(payload: str) -> str:
    """Rank 0 ends in a segmentation fault."""
    import ctypes

    if _rank() == 0:
        ctypes.string_at(0)
    time.sleep(60)
    return ""


def fail_beside_a_reduce(payload: str) -> str:
    """Rank 1 raises after one all-reduce; the others wait for it in the next one."""
    import torch
    import torch.distributed as dist

    signal.signal(signal.SIGTERM, lambda *_: None)  # as a trainer's, which notes the request
    _join_plainly()
    dist.all_reduce(torch.ones(()))
    if _rank() == 1:
        raise ValueError("only rank 1 knows why")
    note.operation = "all-reduce"
    dist.all_reduce(torch.ones(()))
    return ""


def hang(payload: str) -> str:
    """Take steps that meet in all-reduces; in early attempts rank 1 hangs as the payload says."""
    import re

    import torch
    import torch.distributed as dist

    kinds = payload.split()
    kind = kinds[_attempt()] if _attempt() < len(kinds) else ""
    _join_plainly()
    for step in range(1, 40):
        note.begin(step)
        if _rank() == 1 and step == 20:
            if kind == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if kind == "lock":  # the interpreter
                re.match("(a?){40}a{40}", "a" * 40)
        if kind == "skip" and step == 20 and _rank() != 1:
            note.enter("all-gather")
            dist.all_gather([torch.ones(()), torch.ones(())], torch.ones(()))
        note.enter("all-reduce")
        dist.all_reduce(torch.ones(()))
        note.leave()
        note.count(1, 0.01, 0.0, 0.0)
        time.sleep(0.01)
    if kind == "late":
        note.operation = "evaluate"
        time.sleep(1.5)
    dist.destroy_process_group()
    return f"attempt {_attempt()}"


def look_at_store(payload: str) -> str:
    """Meet in the store, and tell what another process of this machine could do with it."""
    import socket
    import stat

    import torch

    from paceline.distributed.environment import current_placement, read_environment, store_file
    from paceline.distributed.group import joined

    path = Path(store_file(read_environment()))
    with joined(current_placement(), torch.device("cpu"), "gloo", 60.0) as group:
        told = group.gather_texts(f"{_rank()}")
        with socket.socket() as caller:
            code = caller.connect_ex(("127.0.0.1", int(os.environ["MASTER_PORT"])))
        modes = [stat.S_IMODE(place.stat().st_mode) for place in path.parents[:2]]
        refused = _refused_to_nobody(path) if os.geteuid() == 0 else True
    if payload and _attempt() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    seen = {"told": told, "connect": code, "modes": modes, "refused": refused, "file": str(path)}
    return json.dumps(seen)


def _refused_to_nobody(path: Path) -> bool:
    """Try to open a file as the user `nobody`."""
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        try:
            os.open(path, os.O_RDONLY)
        except PermissionError:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def plain_groups(payload: str) -> str:
    """Make a process group as plain PyTorch does, twice."""
    import torch
    import torch.distributed as dist

    sums = []
    for _ in range(2):
        _join_plainly()
        row = torch.tensor([float(dist.get_rank() + 1)])
        dist.all_reduce(row)
        sums.append(row.item())
        dist.destroy_process_group()
    return json.dumps(sums)
