"""What a process that a guard has started says to the launcher, and hears from it."""

import os
import threading
from collections.abc import Iterator
from functools import cache
from typing import IO

from paceline.launch.processes import die_with_parent
from paceline.launch.ssh.agent import DESCRIPTOR_VARIABLE, PARENT_VARIABLE
from paceline.launch.ssh.protocol import Message, decode, encode

_CHUNK = 1 << 16

_lock = threading.Lock()
_unread = bytearray()  # of this process's input, of which there is one


def payload() -> Message:
    """Read what this process is to do: the first line of its input. Call it first.

    From now on the kernel ends this process when the guard ends.

    Raises:
        RuntimeError: No guard has started this process.
    """
    if PARENT_VARIABLE not in os.environ:
        raise RuntimeError("this module is started by a guard, by nobody else")
    die_with_parent(int(os.environ.pop(PARENT_VARIABLE)))
    for message in heard():
        return message
    raise RuntimeError("the guard has said nothing")


def tell(message: Message) -> None:
    """Say something to the launcher. Threads may call it."""
    with _lock:
        stream = _stream()
        stream.write(encode(message))
        stream.flush()


def heard() -> Iterator[Message]:
    """Go through what the launcher says, until it has no more to say. A daemon thread may do it."""
    while True:
        while b"\n" not in _unread:
            chunk = os.read(0, _CHUNK)  # a buffered stream would be locked when Python ends
            if not chunk:
                return
            _unread.extend(chunk)
        line, _, rest = bytes(_unread).partition(b"\n")
        _unread[:] = rest
        message = decode(line)
        if message is not None:
            yield message


@cache
def _stream() -> IO[bytes]:
    descriptor = int(os.environ.pop(DESCRIPTOR_VARIABLE))
    os.set_inheritable(descriptor, False)
    return os.fdopen(descriptor, "wb")
