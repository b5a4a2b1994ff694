"""Hosts that were lost and come back, and hosts that the hostfile names anew."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import final

from paceline.errors import InfrastructureError, PacelineError
from paceline.launch.ssh.connection import CONNECT_S, Connection, ConnectionPool
from paceline.launch.ssh.hostfile import Host
from paceline.launch.ssh.options import HostsOptions
from paceline.launch.ssh.participants import StopState

MakeReady = Callable[[Sequence[Host], threading.Event | None], Sequence[Host]]
"""Makes hosts ready before they are connected: their Python, the code on them. The event, which
another thread may set, breaks that off."""

_RETRY_S = 5.0
_BACK_S = 5.0
"""How long a restart waits for hosts that were lost: a broken connection is mended in this time."""
_WAIT_S = 600.0
"""How long a training waits for enough hosts before it gives up."""
_POLL_S = 0.2
_JOIN_S = 2.0


@final
class Reconnection:
    """Tries to connect one host until it is there; a thread of its own, so that none waits."""

    def __init__(
        self, host: Host, options: HostsOptions, ready: MakeReady, store_port: int
    ) -> None:
        self.host = host
        self._options = options
        self._ready = ready
        self._store_port = store_port
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._thread = threading.Thread(
            target=self._repeat, name=f"paceline-reconnection-{host.name}", daemon=True
        )
        self._thread.start()

    def take(self) -> Connection | None:
        """Give the connection if the host is there; the reconnection is then over."""
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            self._over.set()
        return connection

    def end(self) -> None:
        """Give up. What is connected is closed."""
        self._over.set()
        self._thread.join(_JOIN_S)
        connection = self.take()
        if connection is not None:
            connection.close()

    def _repeat(self) -> None:
        while not self._over.is_set():
            connection = self._try()
            if connection is not None:
                # Offer the connection, and watch it until it is taken, or is lost again.
                with self._lock:
                    self._connection = connection
                while not (self._over.wait(_POLL_S) or connection.lost):
                    pass
                with self._lock:
                    # `take` may have won the race: then it belongs to the pool, which closes it.
                    ours = self._connection is connection
                    if ours and connection.lost:
                        self._connection = None
                if ours and connection.lost:
                    connection.close()
            self._over.wait(_RETRY_S)

    def _try(self) -> Connection | None:
        try:
            (host,) = self._ready([self.host], self._over)
            connection = Connection(host, self._options, self._store_port)
        except (PacelineError, OSError):
            return None  # tried again; the host may be starting
        if connection.wait(CONNECT_S, self._over) and not self._over.is_set():
            return connection
        connection.close()
        return None


@final
class HostRecovery:
    """Brings back hosts that were lost, and takes in those that the hostfile names anew."""

    def __init__(
        self,
        pool: ConnectionPool,
        options: HostsOptions,
        ready: MakeReady,
        store_port: int,
    ) -> None:
        self._pool = pool
        self._options = options
        self._ready = ready
        self._store_port = store_port
        self._wanted: Sequence[Host] = options.read()
        self._connected = {host.name: host for host in self._wanted}
        """As they stood in the hostfile when they were connected."""
        self._reconnections: dict[str, Reconnection] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="paceline-hosts", daemon=True)

    @contextmanager
    def running(self) -> Iterator["HostRecovery"]:
        """Look for them in the background."""
        self._thread.start()
        try:
            yield self
        finally:
            self._over.set()
            self._thread.join()
            for reconnection in self._reconnections.values():
                reconnection.end()

    def rejoin(self, least: int, stop: StopState, print_line: Callable[[str], None]) -> None:
        """Add the hosts that are back to the pool, and remove those that are no longer named.

        Args:
            least: How many hosts there must be; it is waited for them.
            stop: The user's wish to stop, which ends the wait.
            print_line: Called with a line for the user about hosts that come, and about waiting.

        Raises:
            InfrastructureError: There aren't enough in time.
        """
        begun_s, announced = time.monotonic(), False
        while not stop.requested:
            there, wanted = self._merge(print_line), len(self._wanted)
            waited_s = time.monotonic() - begun_s
            # All are back; or enough of them, and the others have had their time.
            if there >= least and (there >= wanted or waited_s > _BACK_S):
                return
            if waited_s > _WAIT_S:
                raise InfrastructureError(
                    f"{there} of {wanted} hosts are there after {_WAIT_S:g} s, and --min-hosts is "
                    f"{least}"
                )
            if waited_s > _BACK_S and not announced:
                announced = True
                print_line(f"Waiting for hosts: {there} of at least {least} are there")
            time.sleep(_POLL_S)

    def _merge(self, print_line: Callable[[str], None]) -> int:
        """Put the pool into the order of the hostfile. Returns how many hosts there are."""
        with self._lock:
            alive = {c.host.name: c for c in self._pool.hosts}
            wanted = {host.name: host for host in self._wanted}
            # Part with hosts that the hostfile doesn't name any more, or names with other settings.
            for name, connection in list(alive.items()):
                if wanted.get(name) != self._connected.get(name):  # not named, or otherwise
                    del alive[name]
                    connection.close()
            # Take in those that were reached meanwhile.
            for name, reconnection in list(self._reconnections.items()):
                if wanted.get(name) != reconnection.host:
                    self._reconnections.pop(name).end()
                elif (again := reconnection.take()) is not None:
                    del self._reconnections[name]
                    back = "is back" if name in self._connected else "is new"
                    print_line(f"{name} {back}, and takes part from now on")
                    self._connected[name] = reconnection.host
                    alive[name] = again
            # The rest of the lost ones is closed, and the order of ranks is again the hostfile's.
            for lost in self._pool.lost_ones:
                lost.close()
            self._pool.replace([alive[name] for name in wanted if name in alive])
            return len(alive)

    def _repeat(self) -> None:
        while not self._over.wait(_POLL_S):
            with self._lock:
                self._read()
                alive = {connection.host.name for connection in self._pool.hosts}
                for host in self._wanted:
                    if host.name not in alive and host.name not in self._reconnections:
                        self._reconnections[host.name] = Reconnection(
                            host, self._options, self._ready, self._store_port
                        )

    def _read(self) -> None:
        """Read the hostfile again; one that is being edited counts as it was."""
        try:
            self._wanted = self._options.read()
        except PacelineError:
            return
