"""How the doctor talks with a probe: through ssh, or with a process of this machine."""

import os
import subprocess
import sys
import threading
from collections import deque
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Protocol, final

from paceline.distributed.environment import read_environment
from paceline.errors import InfrastructureError
from paceline.launch.ssh.agent import DESCRIPTOR_VARIABLE, PARENT_VARIABLE
from paceline.launch.ssh.connection import RemoteProcess
from paceline.launch.ssh.protocol import Message, decode, encode, lines_of

PROBE = "paceline.doctor.probe"
_END_S = 3.0
_TAIL_LINES = 20


class ProbeTransport(Protocol):
    """A connection between the doctor and one probe; a JSON object a line."""

    def send(self, message: Message) -> None:
        """Send a message; dropped silently where the probe is gone."""

    def receive(self, timeout_s: float) -> Message:
        """Wait for its next message.

        Raises:
            InfrastructureError: It is silent for so long, or gone.
        """

    def end(self) -> None:
        """End the probe."""


@final
class RemoteLine:
    """A probe behind an ssh connection."""

    def __init__(self, remote: RemoteProcess) -> None:
        self._remote = remote

    def send(self, message: Message) -> None:
        """Send a message."""
        self._remote.send(message)

    def receive(self, timeout_s: float) -> Message:
        """Wait for the next message."""
        message = next(self._remote.messages(timeout_s), None)
        if message is None:
            raise InfrastructureError("its probe has ended without a word")
        return message

    def end(self) -> None:
        """End the probe."""
        self._remote.end()


@final
class LocalLine:
    """A probe that is a child of this process; it ends with it."""

    def __init__(self, payload: Message) -> None:
        reading, writing = os.pipe()
        own = {DESCRIPTOR_VARIABLE: str(writing), PARENT_VARIABLE: str(os.getpid())}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", PROBE],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={**read_environment(), **own},
                pass_fds=(writing,),
                start_new_session=True,  # Ctrl-C is for the doctor, which ends it
            )
        finally:
            os.close(writing)
        self._inbox: SimpleQueue[Message | None] = SimpleQueue()
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._threads = [
            threading.Thread(target=self._read, args=(reading,), daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        self.send(payload)

    def send(self, message: Message) -> None:
        """Send a message."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(encode(message))
            self._process.stdin.flush()

    def receive(self, timeout_s: float) -> Message:
        """Wait for the next message."""
        try:
            message = self._inbox.get(timeout=timeout_s)
        except Empty:
            raise InfrastructureError(f"no answer in {timeout_s:g} s") from None
        if message is None:
            self._inbox.put(None)  # for whoever asks again
            self._threads[1].join(_END_S)
            last = self._tail[-1] if self._tail else "it said nothing"
            raise InfrastructureError(f"its probe has ended: {last}")
        return message

    def end(self) -> None:
        """End the probe."""
        with suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread in self._threads:
            thread.join(_END_S)

    def _read(self, descriptor: int) -> None:
        with os.fdopen(descriptor, "rb", buffering=0) as stream:
            for line in lines_of(stream):
                message = decode(line)
                if message is not None:
                    self._inbox.put(message)
        self._inbox.put(None)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            for line in stream:
                self._tail.append(line.decode(errors="replace").rstrip())
