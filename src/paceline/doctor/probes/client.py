"""Connects to the probes of other hosts: do their ports open, how far, how fast?"""

import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from statistics import median
from typing import final

from paceline.doctor.bandwidth import HostLink
from paceline.doctor.facts import Contact
from paceline.doctor.probes.handshake import (
    Tokens,
    authenticate,
    receive,
    receive_line,
    send_line,
)
from paceline.doctor.probes.server import CHUNK_BYTES, CLOCK

_CONNECT_S = 4.0
_STALL_S = 4.0
_PINGS, _PINGS_S = 100, 1.0
_CLOCK_SAMPLES = 7
_STREAMS = 4
_HEADERS_BYTES = {socket.AF_INET: 28, socket.AF_INET6: 48}
_USUAL_MTUS = (9000, 8900, 1500, 1460, 1450, 1440, 1420, 1400, 1380, 1280, 576)
# Linux's numbers: Python 3.11 has no names for them. Packets go undivided, whatever the kernel
# believes to know of the path.
_UNDIVIDED = {
    socket.AF_INET: (socket.IPPROTO_IP, 10, 3),
    socket.AF_INET6: (socket.IPPROTO_IPV6, 23, 3),
}
_ANSWER_S = 0.3


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another host, as a probe connects to it."""

    name: str = ""
    address: str = ""
    ports: tuple[int, ...] = ()
    datagram_port: int = 0

    @property
    def family(self) -> socket.AddressFamily:
        """Of the address."""
        return socket.AF_INET6 if ":" in self.address else socket.AF_INET


class _UnknownPeerError(OSError):
    """Something else than a probe of this examination listens at that address."""


def contact(peer: Peer, tokens: Tokens, mtu: int) -> Contact:
    """Try every port of a host, and over the first open one its clock and the link's packets.

    Args:
        tokens: By which both know each other.
        mtu: Of this host's interface.
    """
    client = PeerClient(peer, tokens)
    tried = {port: client.try_port(port) for port in peer.ports}
    opened = tuple(port for port, problem in tried.items() if not problem)
    closed = tuple(port for port, problem in tried.items() if problem)
    contact = Contact(
        open_ports=opened,
        closed_ports=closed,
        problem=next((problem for problem in tried.values() if problem), ""),
    )
    if not opened:
        return contact
    # Over the first open port: the clock, the route, and the packets.
    usable = PeerClient(replace(peer, ports=opened), tokens)
    with suppress(OSError, ValueError):
        ahead_s, error_s = usable.compare_clocks()
        contact = replace(contact, clock_ahead_s=ahead_s, clock_error_s=error_s)
    with suppress(OSError, ValueError):
        contact = replace(contact, source=usable.source())
    return replace(contact, largest_packet=usable.largest_packet(mtu))


def measure(peer: Peer, tokens: Tokens, duration_s: float, own_name: str) -> HostLink:
    """Measure the bandwidth to a host and the round-trip. Blocks, twice `duration_s` and a bit."""
    client = PeerClient(peer, tokens)
    link = HostLink(source=own_name, target=peer.name)
    try:
        link = replace(link, round_trip_s=client.round_trip())
        link = replace(link, bandwidth_bytes_per_s=client.bandwidth(1, duration_s))
        return replace(link, several_bytes_per_s=client.bandwidth(_STREAMS, duration_s))
    except (OSError, ValueError) as error:
        return replace(link, problem=_words(error))


@final
class PeerClient:
    """Connects to one host."""

    def __init__(self, peer: Peer, tokens: Tokens) -> None:
        self._peer = peer
        self._tokens = tokens

    def try_port(self, port: int) -> str:
        """Say why a port can't be used; empty where it can."""
        try:
            with self._connected("meet", port=port) as stream:
                receive_line(stream)
        except (OSError, ValueError) as error:
            return _words(error)
        return ""

    def source(self) -> str:
        """Say from which address this host goes there."""
        with self._connected("meet") as stream:
            return str(stream.getsockname()[0])

    def compare_clocks(self) -> tuple[float, float]:
        """Find out how far the other's clock is ahead, as NTP does, and how exact that is.

        Returns:
            Seconds, and half of the shortest round-trip.
        """
        # offset = t_other - t_own - delay / 2, of the sample with the least delay
        # (RFC 5905, sections 8 and 10).
        samples = []
        with self._connected("time") as stream:
            for _ in range(_CLOCK_SAMPLES):
                own_s, before_s = time.time(), time.monotonic()
                stream.sendall(b"?")
                (other_s,) = CLOCK.unpack(receive(stream, CLOCK.size))
                half_s = (time.monotonic() - before_s) / 2
                samples.append((half_s, other_s - own_s - half_s))
        half_s, ahead_s = min(samples)
        return ahead_s, half_s

    def round_trip(self) -> float:
        """Give the median round-trip of one byte, in seconds."""
        times: list[float] = []
        with self._connected("echo") as stream:
            until_s = time.monotonic() + _PINGS_S
            while len(times) < _PINGS and time.monotonic() < until_s:
                before_s = time.perf_counter()
                stream.sendall(b".")
                if not stream.recv(1):
                    raise ConnectionResetError("the other side has closed the connection")
                times.append(time.perf_counter() - before_s)
        return median(times)

    def bandwidth(self, streams: int, duration_s: float) -> float:
        """Send as fast as it goes for a while.

        Returns:
            Bytes per second, as the other side has counted them.
        """
        rates: list[float] = []
        problems: list[Exception] = []
        threads = [
            threading.Thread(target=self._send, args=(duration_s, rates, problems), daemon=True)
            for _ in range(streams)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if problems:
            raise problems[0]
        return sum(rates)

    def largest_packet(self, mtu: int) -> int | None:
        """Find the largest packet that arrives without being divided, up to the interface's own.

        Returns:
            Bytes with headers; None where no answer came at all (a firewall may close UDP), or
            where this system can't say that packets mustn't be divided.
        """
        if not sys.platform.startswith("linux"):
            return None
        with socket.socket(self._peer.family, socket.SOCK_DGRAM) as stream:
            stream.setsockopt(*_UNDIVIDED[self._peer.family])
            stream.settimeout(_ANSWER_S)
            # A small datagram tells a closed port from a packet that is too large.
            if not self._arrives(stream, 4 * len(self._tokens.asks)):
                return None
            sizes = sorted({mtu, *(size for size in _USUAL_MTUS if size < mtu)}, reverse=True)
            headers = _HEADERS_BYTES[self._peer.family]
            return next((s for s in sizes if self._arrives(stream, s - headers)), 0)

    def _arrives(self, stream: socket.socket, size: int) -> bool:
        content = self._tokens.asks.encode().ljust(size, b"\0")
        expected = self._tokens.answers.encode() + struct.pack("!I", size)
        # UDP may lose one.
        for _ in range(2):
            with suppress(OSError):
                stream.sendto(content, (self._peer.address, self._peer.datagram_port))
                if stream.recv(256) == expected:
                    return True
        return False

    def _send(self, duration_s: float, rates: list[float], problems: list[Exception]) -> None:
        sent, chunk = 0, memoryview(bytes(CHUNK_BYTES))
        try:
            with self._connected("take", duration_s) as stream:
                if sys.platform.startswith("linux"):  # what is queued here mustn't outlast the test
                    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, CHUNK_BYTES)
                until_s = time.monotonic() + duration_s
                while time.monotonic() < until_s:
                    sent += stream.send(chunk)
                # The end. The receiver's count is taken: what is sent may only be queued.
                stream.shutdown(socket.SHUT_WR)
                reply = receive_line(stream)
            received, received_s = int(str(reply["bytes"])), float(str(reply["seconds"]))
            if not received or not received_s:
                raise ValueError("too little arrived to measure")
            rates.append(received / received_s)
        except TimeoutError:
            problems.append(TimeoutError(f"nothing went through any more after {sent:,} bytes"))
        except (OSError, ValueError) as error:
            problems.append(error)

    @contextmanager
    def _connected(
        self, do: str, duration_s: float = 0.0, port: int | None = None
    ) -> Iterator[socket.socket]:
        """Connect, authenticate, and send the kind of request."""
        target = (self._peer.address, port or self._peer.ports[0])
        stream = socket.create_connection(target, timeout=_CONNECT_S)
        with stream:
            stream.settimeout(_STALL_S)
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not authenticate(stream, self._tokens):
                raise _UnknownPeerError("somebody else listens there")
            send_line(stream, {"do": do, "duration_s": duration_s})
            yield stream


def _words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return str(error) if "bytes" in str(error) else "no answer"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error)
