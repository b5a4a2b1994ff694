"""The agent on a host, at the far end of an ssh connection: starts processes, relays their output.

Where its launcher ends, or gives no sign of life for LEASE_S, it kills all that it has started, and
ends. It needs neither a server's setting nor a file on the host, and imports no torch.
"""

import json
import os
import queue
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from socket import gethostname
from typing import IO, final

import psutil

from paceline._version import __version__
from paceline.launch.process_tree import adopt_orphans
from paceline.launch.processes import reap
from paceline.launch.ssh.protocol import LEASE_S, LineBuffer, Message, decode, encode

DESCRIPTOR_VARIABLE = "PACELINE_GUARD_FD"
PARENT_VARIABLE = "PACELINE_GUARD_PID"

_MODULE = re.compile(r"paceline(\.[a-z_]+)+")
_BACKLOG = 1000
_CHUNK = 1 << 16
_ORPHAN_S = 2.0
_GENERATIONS = 10
"""An orphan's own children are orphans once it is gone."""
_STUCK_S = 1.0
_CANNOT_START = 70


@final
class _Child:
    """A process that is being started, or runs, and the input that is still to be sent to it."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.tried = threading.Event()
        """Set once `process` is there, or never will be."""
        self._inbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def send(self, message: object) -> None:
        """Have a message written to its input; a process that doesn't read holds up nobody else."""
        self._inbox.put(json.dumps(message).encode() + b"\n")

    def write(self, stream: IO[bytes]) -> None:
        """Write the messages as they come, until `finish`."""
        with suppress(OSError), stream:  # it has ended, or is ending
            while (line := self._inbox.get()) is not None:
                stream.write(line)
                stream.flush()

    def finish(self) -> None:
        """End `write`."""
        self._inbox.put(None)

    def end(self) -> None:
        """Kill it."""
        # The order to end may overtake the start.
        self.tried.wait()
        if self.process is not None:
            self.process.kill()


@final
class Agent:
    """The host's end of one connection.

    The main thread reads messages and blocks on nothing else; what may take time has threads.
    """

    def __init__(
        self,
        source: int,
        target: int,
        leave: Callable[[], None],
        lease_s: float = LEASE_S,
        ending: int | None = None,
    ) -> None:
        """Prepare; `run` serves.

        Args:
            source: Descriptor at which the launcher's messages come.
            target: Descriptor for messages to it.
            leave: Called by another thread where the lease ends and the main thread is stuck.
            lease_s: How long the launcher may give no sign of life.
            ending: Descriptor that can be read once it is to end.
        """
        self._lease_s = lease_s
        self._source = source
        self._ending = ending
        self._target = target
        self._leave = leave
        self._outbox: queue.Queue[bytes] = queue.Queue(_BACKLOG)
        self._children: dict[str, _Child] = {}
        self._starting = threading.Lock()  # held by no thread that hears or watches
        self._received_s = time.monotonic()
        self._over = threading.Event()

    def run(self) -> None:
        """Serve until the launcher goes away. Call it in the main thread."""
        threading.Thread(target=self._write, daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()
        try:
            self._serve()
        finally:
            self._over.set()
            with suppress(queue.Full):
                self._outbox.put_nowait(b"")

    def _left_s(self) -> float:
        return self._received_s + self._lease_s - time.monotonic()

    def _watch(self) -> None:
        """Enforce the lease where the main thread can't."""
        while not self._over.wait(max(0.0, self._left_s()) + _STUCK_S):
            if self._left_s() <= 0:
                self._leave()
                return

    def _serve(self) -> None:
        lines = LineBuffer()
        awaited = [self._source] if self._ending is None else [self._source, self._ending]
        while (left_s := self._left_s()) > 0:
            # Wait for the launcher, the order to end, or the lease's end.
            ready, _, _ = select.select(awaited, [], [], left_s)
            if not ready:
                continue
            if self._ending in ready:
                return
            chunk = os.read(self._source, _CHUNK)
            if not chunk:
                return
            # Whatever comes renews the lease.
            self._received_s = time.monotonic()
            for line in lines.feed(chunk):
                message = decode(line)
                if message is not None:
                    self._handle(message)

    def _handle(self, message: Message) -> None:
        do, name = message.get("do"), str(message.get("id"))
        if do == "beat":
            # The host's wall clock, from which the launcher estimates the offset of the clocks.
            self._send_if_room({"is": "beat", "n": message.get("n"), "time_s": time.time()})
        elif do == "hello":
            self._send_if_room(_introduction(message))
        elif do == "start":
            child = self._children[name] = _Child()
            child.send(message.get("payload"))
            threading.Thread(target=self._follow, args=(name, child, message), daemon=True).start()
        elif name in self._children:
            self._handle_child(self._children[name], message)

    def _handle_child(self, child: _Child, message: Message) -> None:
        if message["do"] == "say":
            child.send(message.get("message"))
        elif message["do"] == "end":
            threading.Thread(target=child.end, daemon=True).start()

    def _follow(self, name: str, child: _Child, message: Message) -> None:
        """Start a process; relay its messages, its output and its exit code to the launcher."""
        reading, writing = os.pipe()
        with os.fdopen(reading, "rb") as messages:
            try:
                code = self._relay(name, child, messages, self._started(child, message, writing))
            except (OSError, ValueError) as error:
                self._send({"is": "problem", "id": name, "text": str(error)})
                code = _CANNOT_START
        self._send({"is": "ended", "id": name, "code": code})
        self._children.pop(name, None)

    def _started(self, child: _Child, message: Message, writing: int) -> subprocess.Popen[bytes]:
        module = str(message.get("module"))
        own = {DESCRIPTOR_VARIABLE: str(writing), PARENT_VARIABLE: str(os.getpid())}
        try:
            if not _MODULE.fullmatch(module):
                raise ValueError(f"{module!r} is no part of Paceline")
            directory = _directory(message)
            with self._starting:  # else it could be taken for a leftover before it is known
                child.process = subprocess.Popen(
                    [sys.executable, "-P", "-m", module],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    cwd=directory,
                    env={**os.environ, **own},
                    pass_fds=(writing,),
                    start_new_session=True,
                )
        finally:
            # The child alone keeps the writing end, so that its end is seen as end of file.
            os.close(writing)
            child.tried.set()
        return child.process

    def _relay(
        self, name: str, child: _Child, messages: IO[bytes], process: subprocess.Popen[bytes]
    ) -> int:
        """Relay a process's messages and output until its end. Returns its exit code."""
        threading.Thread(target=child.write, args=(process.stdin,), daemon=True).start()
        readers = [
            threading.Thread(target=self._pass_on, args=(name, stream, source), daemon=True)
            for stream, source in (
                ("messages", messages),
                ("stdout", process.stdout),
                ("stderr", process.stderr),
            )
        ]
        for reader in readers:
            reader.start()
        # After its end: kill what it has left behind, which may still hold the pipes open.
        code = process.wait()
        child.finish()
        self._end_leftovers()
        # No process holds the other end any more, and all messages have to be sent.
        readers[0].join()
        for reader in readers[1:]:
            reader.join(_ORPHAN_S)
        return code

    def _end_leftovers(self) -> None:
        """End what children that are gone have left behind: this process adopts their orphans."""
        for _ in range(_GENERATIONS):
            orphans = self._orphans()
            for orphan in orphans:
                with suppress(psutil.Error):
                    orphan.kill()
            if not orphans:
                return
            psutil.wait_procs(orphans, timeout=_ORPHAN_S)

    def _orphans(self) -> list[psutil.Process]:
        # Under the lock a child that was just started is known, or doesn't exist yet.
        with self._starting:
            processes = [child.process for child in self._children.values()]
            known = {p.pid for p in processes if p is not None and p.poll() is None}
            return [p for p in psutil.Process().children() if p.pid not in known]

    def _pass_on(self, name: str, stream: str, source: IO[bytes]) -> None:
        with source:
            for line in source:
                if stream == "messages":
                    message = decode(line)
                    if message is not None:
                        self._send({"is": "said", "id": name, "message": message})
                else:
                    text = line.decode(errors="replace").rstrip("\n")
                    self._send({"is": "output", "id": name, "stream": stream, "text": text})

    def _send(self, message: Message) -> None:
        self._outbox.put(encode(message))

    def _send_if_room(self, message: Message) -> None:
        """Send without blocking, or drop the message: the main thread must go on reading."""
        with suppress(queue.Full):
            self._outbox.put_nowait(encode(message))

    def _write(self) -> None:
        while line := self._outbox.get():
            try:
                while line:
                    line = line[os.write(self._target, line) :]
            except OSError:
                return  # the launcher has gone; the main thread hears of it


def _directory(message: Message) -> Path:
    """Give the directory to start in."""
    directory = Path(str(message.get("directory") or "~")).expanduser()
    if not directory.is_dir():
        raise ValueError(
            f"there is no directory {directory} on {gethostname()}. Name one by dir= in the "
            "hostfile, or copy yours by --sync-code"
        )
    return directory


def _introduction(message: Message) -> Message:
    return {
        "is": "ready",
        "nonce": message.get("nonce"),
        "paceline": __version__,
        "ssh_address": ssh_address(os.environ),
    }


def ssh_address(environment: Mapping[str, str]) -> str:
    """Give the address of this host at which ssh came in; empty where ssh doesn't say."""
    words = environment.get("SSH_CONNECTION", "").split()
    return words[2].partition("%")[0] if len(words) == 4 else ""


def main() -> None:
    """Run the agent: standard input and output are the connection."""
    target = os.dup(1)
    os.dup2(2, 1)  # what anything prints by mistake must not look like a message
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    ending, ends = os.pipe()
    os.set_blocking(ends, False)
    signal.set_wakeup_fd(ends)  # a SIGTERM just before a wait begins wouldn't interrupt it
    signal.signal(signal.SIGTERM, lambda *_: _kill_all_and_exit())
    adopt_orphans(True)
    try:
        Agent(0, target, _kill_all_and_exit, ending=ending).run()
    finally:
        _kill_all_and_exit()


def _kill_all_and_exit() -> None:
    """Kill everything that was started, and end at once: no thread may hold this up."""
    try:
        for _ in range(3):  # what is killed may have been about to start something
            with suppress(psutil.Error, OSError):
                reap(set())
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
