"""Hosts on one machine: network namespaces on a bridge, with links of a given rate."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_CLONE_NEWNET = 0x40000000  # <sched.h>


def why_not() -> str | None:
    """Say what is missing for network namespaces with links: one is made and removed."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"links need iproute2 ({' and '.join(missing)} not found)"
    try:
        with hosts(1, 1000):
            return None
    except RuntimeError as error:
        return f"links need network namespaces, which only root makes, if at all: {error}"


def congestion_controls() -> list[str]:
    """List those that TCP can have here."""
    known = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
    return known.read_text().split() if known.exists() else []


@contextmanager
def hosts(
    number: int, megabits_per_s: float, queue_ms: float = 50, congestion: str | None = None
) -> Iterator[list[str]]:
    """Lend namespaces with an interface `eth0` each, of this rate in both directions.

    Args:
        number: How many.
        megabits_per_s: The rate.
        queue_ms: For how long a packet waits at most before it is dropped.
        congestion: TCP's congestion control; None for this machine's own.
    """
    names = [f"ordered-{os.getpid()}-{i}" for i in range(number)]
    switch = _switch()
    try:
        _run(f"ip netns add {switch}")
        _run(f"ip -n {switch} link add br0 type bridge forward_delay 0 stp_state 0")
        _run(f"ip -n {switch} link set br0 up")
        for i, name in enumerate(names):
            _run(f"ip netns add {name}")
            _run(f"ip -n {switch} link add port{i} type veth peer name eth0 netns {name}")
            _run(f"ip -n {switch} link set port{i} master br0 up")
            _run(f"ip -n {name} addr add {address_of(i)}/24 dev eth0")
            _run(f"ip -n {name} link set lo up")
            _run(f"ip -n {name} link set eth0 up")
            if congestion is not None:
                _run(
                    f"ip -n {name} route replace 10.77.0.0/24 dev eth0 proto kernel scope link "
                    f"src {address_of(i)} congctl {congestion}"
                )
        set_rate(names, megabits_per_s, queue_ms, verb="add")
        yield names
    finally:
        for name in (*names, switch):
            if Path("/run/netns", name).exists():
                _run(f"ip netns del {name}")


def set_rate(
    names: Sequence[str], megabits_per_s: float, queue_ms: float = 50, verb: str = "change"
) -> None:
    """Give the links of this process's hosts another rate, in both directions."""
    rate = f"rate {round(1000 * megabits_per_s)}kbit burst 128kb latency {queue_ms:g}ms"
    for i, name in enumerate(names):
        for place, device in ((name, "eth0"), (_switch(), f"port{i}")):
            _run(f"tc -n {place} qdisc {verb} dev {device} root tbf {rate}")


def address_of(number: int) -> str:
    """Give the address of a host by its place in the list."""
    return f"10.77.0.{10 + number}"


def enter(name: str) -> None:
    """Move this process, which has one thread, into a namespace."""
    handle = os.open(f"/run/netns/{name}", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(handle, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
    os.close(handle)


def sent_bytes(interface: str) -> int:
    """Read how many bytes have left by an interface of this process's namespace."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    raise ValueError(f"no interface {interface}")


def _switch() -> str:
    return f"ordered-{os.getpid()}-switch"


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, timeout=30)
    if done.returncode != 0:
        raise RuntimeError(f"{command!r} ended with {done.returncode}: {done.stderr.strip()}")
