import socket
import sys

import psutil
import pytest

from paceline.distributed.interface import (
    address_on,
    find_route,
    interface_with,
    is_loopback,
    loopback_route,
    own_addresses,
    reachable_address,
    resolve,
)
from paceline.errors import InfrastructureError, UsageError

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
OUTWARD = [
    (name, entry.address)
    for name, entries in psutil.net_if_addrs().items()
    for entry in entries
    if entry.family == socket.AF_INET and not is_loopback(entry.address)
]
needs_a_network = pytest.mark.skipif(not OUTWARD, reason="this machine has loopback alone")


def test_the_route_to_a_master_on_loopback() -> None:
    for host in ("127.0.0.1", "localhost"):
        route = find_route(host, None, "")
        assert (route.interface, route.address) == (LOOPBACK, "127.0.0.1")
        assert route.chosen_by == "route to rank 0"
        assert reachable_address(host) == "127.0.0.1"
    assert loopback_route().interface == LOOPBACK


@needs_a_network
def test_the_route_to_an_address_of_this_machine() -> None:
    name, address = OUTWARD[0]
    route = find_route(address, None, "")
    assert (route.interface, route.address) == (name, address)
    assert interface_with(address) == name
    assert address in own_addresses()


@needs_a_network
def test_a_name_that_is_loopback_only_here(monkeypatch: pytest.MonkeyPatch) -> None:
    known = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: known)
    route = find_route("node-0", None, "")  # as Debian writes the own name into /etc/hosts
    assert route.chosen_by == "default route"
    assert reachable_address("node-0") == route.address


def test_an_ipv4_address_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    known = [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("2001:db8::1", 0, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("198.51.100.7", 0)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: known)
    assert resolve("both") == "198.51.100.7"


def test_what_was_chosen_counts_before_the_route() -> None:
    asked = find_route("203.0.113.1", LOOPBACK, "eth99")
    assert (asked.interface, asked.chosen_by) == (LOOPBACK, "--interface")
    chosen = find_route("203.0.113.1", None, LOOPBACK)
    assert (chosen.address, chosen.chosen_by) == ("127.0.0.1", "GLOO_SOCKET_IFNAME")


def test_an_interface_that_isnt_there() -> None:
    with pytest.raises(UsageError, match=rf"--interface is eth99, which isn't there.*{LOOPBACK}"):
        find_route("localhost", "eth99", "")
    with pytest.raises(UsageError, match="GLOO_SOCKET_IFNAME is eth99, which isn't there"):
        find_route("localhost", None, "eth99")
    assert address_on(LOOPBACK) == "127.0.0.1"


def test_a_host_that_nobody_knows() -> None:
    with pytest.raises(InfrastructureError, match=r"'nowhere\.invalid' can't be resolved here"):
        find_route("nowhere.invalid", None, "")
