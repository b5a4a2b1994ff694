"""The connections to all hosts at once: made, waited for, ended."""

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import final

from paceline.launch.ssh.connection import CONNECT_S, Connection
from paceline.launch.ssh.hostfile import Host
from paceline.launch.ssh.options import HostsOptions


@final
class Fleet:
    """The connections to all hosts of a training."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self._connections = list(connections)

    @property
    def all(self) -> list[Connection]:
        """Those of use and the others, in the order in which the hosts were named."""
        return list(self._connections)

    @property
    def hosts(self) -> list[Connection]:
        """Those that are of use, in the order in which the hosts were named."""
        return [connection for connection in self._connections if not connection.lost]

    @property
    def lost(self) -> dict[str, str]:
        """Why the others aren't, by the host's name."""
        return {c.host.name: c.lost for c in self._connections if c.lost}

    @property
    def lost_ones(self) -> list[Connection]:
        """Those that are of no use any more."""
        return [connection for connection in self._connections if connection.lost]

    def replace(self, connections: Sequence[Connection]) -> None:
        """Go on with these connections alone, in this order; closing others is the caller's."""
        self._connections = list(connections)

    def close(self) -> None:
        """End all connections."""
        _close(self._connections)


@contextmanager
def connect(
    hosts: Sequence[Host],
    options: HostsOptions,
    store_port: int | None = None,
    *,
    any_version: bool = False,
) -> Iterator[Fleet]:
    """Connect to all hosts at once; on leaving, everything that was started on them is ended.

    Args:
        hosts: Which.
        options: How ssh reaches them.
        store_port: Port of this machine's loopback address that the hosts are to reach.
        any_version: Whether another version of Paceline there will do.

    Yields:
        The connections; hosts that can't be reached are in `lost`.
    """
    made: dict[int, Connection] = {}
    fleet = Fleet([])

    def make(place: int) -> None:
        made[place] = Connection(hosts[place], options, store_port, any_version=any_version)

    try:
        # In threads, which no signal interrupts between the start of an ssh and the note of it.
        with ThreadPoolExecutor(max(1, len(hosts))) as pool:
            list(pool.map(make, range(len(hosts))))
        fleet.replace([made[place] for place in range(len(hosts))])
        wait_for(fleet.hosts)
        yield fleet
    finally:
        _close(list(made.values()))
        fleet.close()


def wait_for(connections: Sequence[Connection], over: threading.Event | None = None) -> None:
    """Wait until each connection is of use or lost.

    Args:
        connections: Which; those without an answer in time are lost.
        over: Once it is set nobody waits any longer; what isn't ready by then is the caller's to
            close.
    """
    deadline_s = time.monotonic() + CONNECT_S
    for connection in connections:
        connection.wait(max(0.0, deadline_s - time.monotonic()), over)


def _close(connections: Sequence[Connection]) -> None:
    with ThreadPoolExecutor(max(1, len(connections))) as pool:
        list(pool.map(Connection.close, connections))
