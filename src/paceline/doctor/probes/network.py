"""Names, addresses and interfaces of this host."""

import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from paceline.distributed.environment import read_environment
from paceline.distributed.interface import find_route, is_loopback, resolve
from paceline.doctor.facts import EPHEMERAL, Interface, NetworkFacts
from paceline.errors import PacelineError
from paceline.launch.ssh.agent import ssh_address

_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_CLASS = Path("/sys/class/net")
_BITS = 1e6 / 8


def network_facts() -> NetworkFacts:
    """Find out how this host is called and can be reached."""
    hostname = socket.gethostname()
    return NetworkFacts(
        hostname=hostname,
        hostname_means=meaning_of(hostname),
        default_address=_default_address(),
        ssh_address=ssh_address(read_environment()),
        interfaces=tuple(_interfaces()),
        port_range=_port_range(_PORT_RANGE),
        congestion=_congestion(_CONGESTION),
    )


def meanings(names: Sequence[str]) -> Mapping[str, str | None]:
    """Say which address each name stands for on this host; None for none."""
    return {name: meaning_of(name) for name in names}


def meaning_of(name: str) -> str | None:
    """Give the address that a name stands for here, an IPv4 one where there is one."""
    try:
        return resolve(name)
    except (PacelineError, UnicodeError):
        return None


def _default_address() -> str:
    try:
        return find_route("", None, "").address
    except PacelineError:
        return ""


def _interfaces() -> list[Interface]:
    states, interfaces = psutil.net_if_stats(), []
    for name, entries in psutil.net_if_addrs().items():
        state = states.get(name)
        # Without link-local addresses, which hold on one link only; IPv4 before IPv6.
        families = {e.address: e.family for e in entries if e.family in _FAMILIES}
        usable = [a for a in families if not a.partition("%")[0].startswith("fe80:")]
        if state is not None and state.isup and usable:
            ordered = sorted(usable, key=lambda address: _FAMILIES.index(families[address]))
            interfaces.append(
                Interface(
                    name=name,
                    addresses=tuple(ordered),
                    mtu=state.mtu,
                    speed_bytes_per_s=_speed(name, state.speed),
                )
            )
    return sorted(interfaces, key=lambda interface: is_loopback(interface.addresses[0]))


def _speed(name: str, megabits_per_s: int) -> float | None:
    """Give a hardware interface's speed: virtual ones report 10 Gbit/s, or anything."""
    virtual = not (_CLASS / name / "device").exists()
    return None if virtual or megabits_per_s <= 0 else megabits_per_s * _BITS


_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def _port_range(path: Path) -> tuple[int, int]:
    with suppress(OSError, ValueError):
        low, high = map(int, path.read_text().split())
        return low, high
    return EPHEMERAL


def _congestion(path: Path) -> str:
    with suppress(OSError, UnicodeError):
        return path.read_text().strip()
    return ""
