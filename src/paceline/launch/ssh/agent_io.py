"""The messages between the launcher and a process that an agent has started on a host."""

import os
import threading
from collections.abc import Iterator
from functools import cache
from typing import IO

from paceline.launch.process_tree import die_with_parent
from paceline.launch.ssh.agent import DESCRIPTOR_VARIABLE, PARENT_VARIABLE
from paceline.launch.ssh.protocol import Message, decode, encode

_CHUNK = 1 << 16

_lock = threading.Lock()
_unread = bytearray()  # of this process's input, of which there is one


def payload() -> Message:
    """Read what this process is to do: the first line of its input. Call it first.

    From now on the kernel ends this process when the agent ends.

    Raises:
        RuntimeError: No agent has started this process.
    """
    if PARENT_VARIABLE not in os.environ:
        raise RuntimeError("this module is started by an agent, by nobody else")
    die_with_parent(int(os.environ.pop(PARENT_VARIABLE)))
    for message in received():
        return message
    raise RuntimeError("the agent has said nothing")


def send(message: Message) -> None:
    """Send a message to the launcher. Threads may call it."""
    with _lock:
        stream = _stream()
        stream.write(encode(message))
        stream.flush()


def received() -> Iterator[Message]:
    """Go through the launcher's messages, until there are no more. A daemon thread may do it."""
    while True:
        while b"\n" not in _unread:
            chunk = os.read(0, _CHUNK)  # a buffered stream would be locked when Python ends
            if not chunk:
                return
            _unread.extend(chunk)
        # The rest stays for the next call: `payload` reads one line, a thread the others.
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
