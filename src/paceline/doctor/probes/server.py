"""Listens for the probes of the other hosts: on one address, as briefly as possible."""

import hmac
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import final

from paceline.doctor.probes.handshake import (
    Tokens,
    accept_peer,
    receive_line,
    send_line,
)

CLOCK = struct.Struct("!d")
CHUNK_BYTES = 1 << 18
_WAIT_S = 5.0
"""For anything that the other side is to say next."""
_MAX_AT_ONCE = 64
_PORTS = 3
_TRIES = 40


@final
class ProbeServer:
    """Ports on which peers try whether they get through, and measure how fast."""

    def __init__(self, address: str, tokens: Tokens, port_range: tuple[int, int]) -> None:
        """Listen from now on.

        Args:
            address: Of this host; the only one that is listened on.
            tokens: Who doesn't know them is sent away.
            port_range: Ports that the kernel hands out: one near each end is tried as well.

        Raises:
            OSError: The address isn't this host's.
        """
        self._tokens = tokens
        self._places = threading.BoundedSemaphore(_MAX_AT_ONCE)
        self._sockets = _listening(address, port_range)
        self._datagrams = socket.socket(self._sockets[0].family, socket.SOCK_DGRAM)
        self._datagrams.bind((address, 0))
        self._wake_r, self._wake_w = socket.socketpair()
        self._thread = threading.Thread(target=self._accept, name="paceline-doctor", daemon=True)
        self._thread.start()

    @property
    def ports(self) -> tuple[int, ...]:
        """The TCP ports; the first one is for measurements."""
        return tuple(int(listening.getsockname()[1]) for listening in self._sockets)

    @property
    def datagram_port(self) -> int:
        """The UDP port that answers how large a packet was."""
        return int(self._datagrams.getsockname()[1])

    def close(self) -> None:
        """Stop listening."""
        self._wake_w.close()
        self._thread.join()
        for opened in (*self._sockets, self._datagrams, self._wake_r):
            opened.close()

    def _accept(self) -> None:
        with selectors.DefaultSelector() as selector:
            for source in (*self._sockets, self._datagrams, self._wake_r):
                selector.register(source, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                # The other end was closed, by `close`.
                if self._wake_r in ready:
                    return
                for listening in self._sockets:
                    if listening in ready:
                        self._admit(listening)
                if self._datagrams in ready:
                    self._measure_packet()

    def _admit(self, listening: socket.socket) -> None:
        with suppress(OSError):
            stream, _ = listening.accept()
            # Places are limited: strangers can't make any number of threads.
            if not self._places.acquire(blocking=False):
                stream.close()
                return
            threading.Thread(target=self._serve, args=(stream,), daemon=True).start()

    def _serve(self, stream: socket.socket) -> None:
        try:
            with stream, suppress(OSError, ValueError):
                stream.settimeout(_WAIT_S)
                stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if accept_peer(stream, self._tokens):
                    request = receive_line(stream)
                    _SERVICES.get(str(request.get("do")), _just_meet)(stream, request)
        finally:
            self._places.release()

    def _measure_packet(self) -> None:
        """Say how long a datagram was; the answer is never longer than what was asked."""
        with suppress(OSError):
            content, sender = self._datagrams.recvfrom(1 << 16)
            asks, answers = self._tokens.asks.encode(), self._tokens.answers.encode()
            if hmac.compare_digest(content[: len(asks)], asks):
                self._datagrams.sendto(answers + struct.pack("!I", len(content)), sender)


def _listening(address: str, port_range: tuple[int, int]) -> list[socket.socket]:
    """Listen on a port that the kernel gives, and near both ends of those that it may give."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listeners = [socket.create_server((address, 0), family=family)]
    low, high = port_range
    for ports in (range(low, low + _TRIES), range(high, high - _TRIES, -1)):
        listeners += _first_free(address, family, ports)
    return listeners[:_PORTS]


def _first_free(
    address: str, family: socket.AddressFamily, ports: Sequence[int]
) -> list[socket.socket]:
    for port in ports:
        with suppress(OSError):
            return [socket.create_server((address, port), family=family)]
    return []


def _echo(stream: socket.socket, request: Mapping[str, object]) -> None:
    while content := stream.recv(64):
        stream.sendall(content)


def _send_time(stream: socket.socket, request: Mapping[str, object]) -> None:
    while stream.recv(1):
        stream.sendall(CLOCK.pack(time.time()))


def _count_received(stream: socket.socket, request: Mapping[str, object]) -> None:
    """Count the bytes that come within a time after the first; later ones are read and dropped.

    A sender's own clock would count what has merely been queued on its side.
    """
    duration_s, buffer = float(str(request.get("duration_s"))), bytearray(CHUNK_BYTES)
    stream.recv_into(buffer)
    counted, first_s = 0, time.monotonic()
    last_s = first_s
    while size := stream.recv_into(buffer):
        now_s = time.monotonic()
        if now_s - first_s <= duration_s:
            counted, last_s = counted + size, now_s
    send_line(stream, {"bytes": counted, "seconds": last_s - first_s})


def _just_meet(stream: socket.socket, request: Mapping[str, object]) -> None:
    send_line(stream, {})


_SERVICES: Mapping[str, Callable[[socket.socket, Mapping[str, object]], None]] = {
    "meet": _just_meet,
    "echo": _echo,
    "time": _send_time,
    "take": _count_received,
}
