"""A small all-reduce over all hosts, one worker each, as a training does one in every step.

Phases: host 0 keeps a store on its one address; all join a process group; a warm-up; some timed
all-reduces whose result is known; all leave.
"""

import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from paceline.distributed.device import is_accelerator, use_device
from paceline.distributed.environment import use_interface

_REPEATS = 3
_PERIOD = 251
"""A prime: pieces that arrive in wrong places show."""


@dataclass(frozen=True, kw_only=True)
class AllReducePlan:
    """One host's part in the all-reduce."""

    rank: int = 0
    world_size: int = 1
    master: str = ""
    """Host 0's address."""
    port: int = 0
    """Of host 0's store."""
    interface: str = ""
    backend: str = "gloo"
    size_bytes: int = 1 << 20
    timeout_s: float = 30.0


@dataclass(frozen=True, kw_only=True)
class AllReduceResult:
    """What came of it on one host."""

    seconds: float = 0.0
    """Median of one all-reduce."""
    is_right: bool = False


def open_store(address: str, timeout_s: float) -> tuple[TCPStore, int]:
    """Keep a store on one address of this host, for as long as the result is held.

    Returns:
        The store and its port.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, 0), family=family)
    port = int(listening.getsockname()[1])
    # The store takes over a socket that is bound to one address; by itself it binds to all.
    store = TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listening.detach(),
    )
    return store, port


def all_reduce(plan: AllReducePlan, kept: TCPStore | None = None) -> AllReduceResult:
    """Join the others, add up, compare with the known result, leave. Collective; blocks.

    Args:
        kept: The store, on the host that keeps it.

    Raises:
        RuntimeError: torch's own: the others didn't come, or the connection broke.
    """
    # Join: at host 0's store.
    timeout = timedelta(seconds=plan.timeout_s)
    store = kept or TCPStore(plan.master, plan.port, is_master=False, timeout=timeout)
    if plan.interface:
        use_interface(plan.interface, override=True)
    device = torch.device("cpu" if plan.backend == "gloo" else "cuda:0")
    use_device(device)
    dist.init_process_group(
        plan.backend,
        store=PrefixStore("paceline/doctor", store),
        rank=plan.rank,
        world_size=plan.world_size,
        timeout=timeout,
        device_id=device if is_accelerator(device) else None,
    )
    # Warm up and measure; then leave, also after an error.
    try:
        return _measured(plan, device)
    finally:
        dist.destroy_process_group()


def _measured(plan: AllReducePlan, device: torch.device) -> AllReduceResult:
    times, is_right = [], True
    # (size_bytes / 4,) of float32. Rank r adds (r + 1) x pattern, n ranks n (n + 1) / 2 x pattern.
    pattern = torch.arange(plan.size_bytes // 4, device=device, dtype=torch.float32) % _PERIOD
    expected = pattern * (plan.world_size * (plan.world_size + 1) // 2)  # exact in float32
    for repeat in range(_REPEATS + 1):
        summed = pattern * (plan.rank + 1)
        # All begin at once, so that nobody's waiting is measured.
        dist.barrier()
        began_s = time.monotonic()
        dist.all_reduce(summed)
        if is_accelerator(device):
            torch.accelerator.synchronize(device)
        if repeat:  # the first one is the warm-up
            times.append(time.monotonic() - began_s)
        is_right = is_right and torch.equal(summed, expected)
    dist.barrier()  # nobody leaves, and takes the store along, before all are done
    return AllReduceResult(seconds=median(times), is_right=is_right)
