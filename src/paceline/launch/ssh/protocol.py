"""Messages between launcher and hosts: a JSON object a line."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import IO, final

from paceline.errors import InfrastructureError

Message = Mapping[str, object]

LONGEST_BYTES = 64 * 1024 * 1024
HEARTBEAT_S = 2.0
"""How often each side gives a sign of life."""
LEASE_S = 10.0
"""Without one for so long the other side counts as lost."""
_CHUNK = 1 << 16


def encode(message: Message) -> bytes:
    """Write a message as a line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message | None:
    """Read a line; None where it isn't a message, such as what a login shell prints."""
    try:
        content = json.loads(line)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


@final
class LineBuffer:
    """Cuts into lines what comes in pieces."""

    def __init__(self) -> None:
        self._begun: list[bytes] = []
        self._held_bytes = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """Take the next piece. Returns the lines that end in it, without their newlines.

        Raises:
            InfrastructureError: A line is longer than any message may be.
        """
        head, *more = piece.split(b"\n")
        self._begun.append(head)
        self._held_bytes += len(head)
        if self._held_bytes > LONGEST_BYTES:
            raise InfrastructureError(f"a message is longer than {LONGEST_BYTES} bytes")
        if not more:
            return []
        # The pieces are joined once per line: joining at each piece would be quadratic.
        whole = b"".join(self._begun)
        self._begun = [more.pop()]
        self._held_bytes = len(self._begun[0])
        return [whole, *more]


def lines_of(stream: IO[bytes], on_piece: Callable[[], None] | None = None) -> Iterator[bytes]:
    """Go through a stream's lines, without their newlines.

    Args:
        stream: Unbuffered: it must give what is there without waiting for more.
        on_piece: Called at every piece that comes: a long line over a slow link is no silence.

    Raises:
        InfrastructureError: A line is longer than any message may be.
    """
    lines = LineBuffer()
    while piece := stream.read(_CHUNK):
        if on_piece is not None:
            on_piece()
        yield from lines.feed(piece)
    yield from filter(None, lines.feed(b"\n"))
