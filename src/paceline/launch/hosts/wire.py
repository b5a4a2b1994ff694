"""Messages between launcher and hosts: a JSON object a line."""

import json
from collections.abc import Mapping
from typing import IO

from paceline.errors import InfrastructureError

Message = Mapping[str, object]

LONGEST_BYTES = 64 * 1024 * 1024
BEAT_S = 2.0
"""How often each side gives a sign of life."""
LEASE_S = 10.0
"""Without one for so long the other side counts as lost."""


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


def read_line(stream: IO[bytes]) -> bytes:
    """Read one line; empty at the end.

    Raises:
        InfrastructureError: It is longer than any message may be.
    """
    line = stream.readline(LONGEST_BYTES)
    if len(line) == LONGEST_BYTES:
        raise InfrastructureError(f"a message is longer than {LONGEST_BYTES} bytes")
    return line
