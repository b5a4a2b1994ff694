"""Mutual authentication of two probes, by tokens that reach both through ssh."""

import hmac
import json
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass

_BYTES = 32
_LONGEST = 1024


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """What only the probes of one examination know; it reaches them through ssh."""

    asks: str = ""
    """Sent by the side that connects."""
    answers: str = ""
    """Sent back by the side that listens."""

    @classmethod
    def made(cls) -> "Tokens":
        """Draw new ones."""
        return cls(asks=secrets.token_hex(_BYTES), answers=secrets.token_hex(_BYTES))


def accept_peer(stream: socket.socket, tokens: Tokens) -> bool:
    """Check the token of who has connected, and reply with ours; a stranger gets not a byte."""
    received = receive(stream, 2 * _BYTES)
    if not tokens.asks or not hmac.compare_digest(received, tokens.asks.encode()):
        return False
    stream.sendall(tokens.answers.encode())
    return True


def authenticate(stream: socket.socket, tokens: Tokens) -> bool:
    """Send our token, and check the reply; False where something else listens there."""
    stream.sendall(tokens.asks.encode())
    return hmac.compare_digest(receive(stream, 2 * _BYTES), tokens.answers.encode())


def receive(stream: socket.socket, count: int) -> bytes:
    """Read so many bytes, or what there is before the end."""
    parts, missing = [], count
    while missing and (part := stream.recv(missing)):
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def send_line(stream: socket.socket, message: Mapping[str, object]) -> None:
    """Send a JSON object as a line."""
    stream.sendall(json.dumps(message).encode() + b"\n")


def receive_line(stream: socket.socket) -> Mapping[str, object]:
    """Read a line with a JSON object.

    Raises:
        ValueError: It is none, or too long.
    """
    line = b""
    while not line.endswith(b"\n") and (byte := stream.recv(1)):
        line += byte
        if len(line) > _LONGEST:
            raise ValueError("the line is too long")
    content = json.loads(line)
    if not isinstance(content, dict):
        raise ValueError(f"expected an object, not {content!r}")
    return content
