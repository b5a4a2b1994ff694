"""Chooses the network interface and address to reach the other workers by."""

import ipaddress
import socket
from dataclasses import dataclass
from typing import Literal

import psutil

from paceline.errors import InfrastructureError, UsageError

_FAR = "192.0.2.1"
"""RFC 5737: an address of nobody. The kernel looks up the route; nothing is sent."""

ChosenBy = Literal["--interface", "GLOO_SOCKET_IFNAME", "route to rank 0", "default route"]


@dataclass(frozen=True, kw_only=True)
class Route:
    """Network interface and own address that the other workers are reached by."""

    interface: str
    address: str
    """This node's address on it."""
    chosen_by: ChosenBy


def find_route(host: str, requested: str | None, chosen: str) -> Route:
    """Choose the interface: the one asked for, one set before, or that of the route to rank 0.

    A name that stands for the loopback address only on its own host (as Debian's /etc/hosts has
    it) leads nowhere for the others: the default route counts then.

    Args:
        host: Rank 0's host; empty where workers meet in a file.
        chosen: GLOO_SOCKET_IFNAME; may be empty.

    Raises:
        UsageError: There is no such interface, or it has no address.
        InfrastructureError: The name can't be resolved, or no route leads there.
    """
    if requested:
        return Route(interface=requested, address=address_on(requested), chosen_by="--interface")
    if chosen:
        address = address_on(chosen, "GLOO_SOCKET_IFNAME")
        return Route(interface=chosen, address=address, chosen_by="GLOO_SOCKET_IFNAME")
    # A host name that leads to loopback (as /etc/hosts may have it) says nothing about the network.
    if not host or is_loopback_name(host):
        by: ChosenBy = "default route"
        address = _source_address(_FAR)
    else:
        by, address = "route to rank 0", _source_address(resolve(host))
    return Route(interface=interface_with(address), address=address, chosen_by=by)


def loopback_route() -> Route:
    """The way between workers that are all on this machine."""
    return Route(
        interface=interface_with("127.0.0.1"), address="127.0.0.1", chosen_by="route to rank 0"
    )


def resolve(host: str) -> str:
    """Find a host's address, an IPv4 one where there is one, so that all workers take the same.

    Raises:
        InfrastructureError: The name isn't known here.
    """
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise InfrastructureError(
            f"the host {host!r} can't be resolved here ({error.strerror or error}). Give rank 0's "
            "address instead, by MASTER_ADDR or --init-method tcp://ADDRESS:PORT"
        ) from error
    first = min(addresses, key=lambda entry: entry[0] != socket.AF_INET)
    return str(first[4][0])


def is_loopback_name(host: str) -> bool:
    """Tell whether a name means this machine's loopback address here, and another one elsewhere."""
    return is_loopback(resolve(host)) and not _means_loopback(host)


def reachable_address(host: str) -> str:
    """Give the address at which all workers reach a host; on the host itself the same one."""
    return _source_address(_FAR) if is_loopback_name(host) else resolve(host)


def is_loopback(address: str) -> bool:
    """Tell whether an address is this machine's alone."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def own_addresses() -> set[str]:
    """List the addresses of this machine (of its network namespace)."""
    listed = psutil.net_if_addrs().values()
    return {entry.address.partition("%")[0] for entries in listed for entry in entries}


def address_on(interface: str, option: str = "--interface") -> str:
    """Give the address of an interface, an IPv4 one where it has one.

    Raises:
        UsageError: There is no such interface, it is down, or it has no address.
    """
    known = psutil.net_if_addrs()
    families = (socket.AF_INET, socket.AF_INET6)
    entries = [e for e in known.get(interface, ()) if e.family in families]
    if not entries:
        why = "isn't there"
        if interface in known:
            stats = psutil.net_if_stats().get(interface)
            is_down = stats is not None and not stats.isup
            why = f"is down (ip link set {interface} up)" if is_down else "has no address"
        raise UsageError(
            f"{option} is {interface}, which {why}. Interfaces here: {', '.join(sorted(known))}"
        )
    return min(entries, key=lambda entry: families.index(entry.family)).address


def interface_with(address: str) -> str:
    """Name the interface that has an address.

    Raises:
        InfrastructureError: None has.
    """
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name
    if is_loopback(address):  # 127.0.1.1 and its like belong to the loopback interface as well
        return interface_with("127.0.0.1")
    raise InfrastructureError(f"no network interface here has the address {address}")


def _means_loopback(host: str) -> bool:
    try:
        return is_loopback(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _source_address(target: str) -> str:
    """Ask the kernel from which address a packet to `target` would leave."""
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            # Connecting a UDP socket sends nothing: the kernel only looks up the route.
            probe.connect((target, 9))
        except OSError as error:
            if target == _FAR:
                return "127.0.0.1"  # a machine without a network
            raise InfrastructureError(
                f"no route leads from this host to {target} ({error.strerror})"
            ) from error
        return str(probe.getsockname()[0])
