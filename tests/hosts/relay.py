"""A switch in user space that holds frames back: `relay.py DELAY_MS PORT...`, in its own network.

Kernels without netem have no delay of their own. Frames come and go by packet sockets, large ones
whole (up to 64 KiB, with the header that virtio has for them), so that Python keeps up.
"""

import ctypes
import heapq
import itertools
import os
import select
import socket
import struct
import sys
import time

_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 15, 23
_ETH_P_ALL = 3
_PR_SET_TIMERSLACK = 29
_VNET_HEADER_BYTES = 10
_FRAME_BYTES = 70_000
_AT_ONCE = 16
_BUFFER_BYTES = 8 << 20


class Relay:
    """Learns which station is behind which port, as a switch does."""

    def __init__(self, ports: list[socket.socket], delay_s: float) -> None:
        self._ports = ports
        self._delay_s = delay_s
        self._behind: dict[bytes, socket.socket] = {}
        self._waiting: list[tuple[float, int, socket.socket, bytes]] = []
        self._number = itertools.count()

    def turn(self) -> None:
        """Send what is due, then take in what comes until more is due."""
        while self._waiting and self._waiting[0][0] <= time.monotonic():
            _, _, port, frame = heapq.heappop(self._waiting)
            _send(port, frame)
        wait_s = max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else None
        ready, _, _ = select.select(self._ports, [], [], wait_s)
        for port in ready:
            for _ in range(_AT_ONCE):
                got = _receive(port)
                if got is None:
                    break
                self._take(port, got)

    def _take(self, port: socket.socket, frame: bytes) -> None:
        addresses = frame[_VNET_HEADER_BYTES:]
        to, sender = addresses[:6], addresses[6:12]
        self._behind[sender] = port
        outs = [self._behind[to]] if to in self._behind else [p for p in self._ports if p != port]
        due_s = time.monotonic() + self._delay_s
        for out in outs:
            heapq.heappush(self._waiting, (due_s, next(self._number), out, frame))


def _receive(port: socket.socket) -> bytes | None:
    try:
        return port.recv(_FRAME_BYTES)
    except OSError:  # nothing there, or the link is down
        return None


def _send(port: socket.socket, frame: bytes) -> None:
    try:
        port.send(frame)
    except OSError:  # as a full switch does, it drops
        return


def _open(name: str) -> socket.socket:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    port.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    for which in (33, 32):  # SO_RCVBUFFORCE and SO_SNDBUFFORCE
        port.setsockopt(socket.SOL_SOCKET, which, struct.pack("i", _BUFFER_BYTES))
    port.bind((name, _ETH_P_ALL))
    port.setblocking(False)
    return port


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    relay = Relay([_open(name) for name in sys.argv[2:]], float(sys.argv[1]) / 1000)
    os.write(1, b"ready\n")
    while True:
        relay.turn()


if __name__ == "__main__":
    main()
