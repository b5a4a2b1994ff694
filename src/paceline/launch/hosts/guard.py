"""Runs on a host, at the other end of an ssh connection: starts processes, passes on their words.

Where its launcher ends, or gives no sign of life for LEASE_S, it kills all that it has started, and
ends. It needs neither a server's setting nor a file on the host, and imports no torch.
"""

import json
import os
import platform
import queue
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from socket import gethostname
from typing import IO, final

import psutil

from paceline._version import __version__
from paceline.launch.hosts.wire import LEASE_S, Message, decode, encode
from paceline.launch.lineage import adopt_orphans
from paceline.launch.processes import reap

DESCRIPTOR_VARIABLE = "PACELINE_GUARD_FD"
PARENT_VARIABLE = "PACELINE_GUARD_PID"

_MODULE = re.compile(r"paceline(\.[a-z_]+)+")
_BACKLOG = 1000
_CHUNK = 1 << 16
_ORPHAN_S = 2.0


@final
class Guard:
    """The host's end of one connection."""

    def __init__(self, source: int, target: int, lease_s: float = LEASE_S) -> None:
        """Prepare; `run` serves.

        Args:
            source: Descriptor at which the launcher's messages come.
            target: Descriptor for what is said to it.
            lease_s: How long it may give no sign of life.
        """
        self._lease_s = lease_s
        self._source = source
        self._target = target
        self._outbox: queue.Queue[bytes] = queue.Queue(_BACKLOG)
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._buffer = b""
        self._heard_s = time.monotonic()

    def run(self) -> None:
        """Serve until the launcher goes away. Call it in the main thread."""
        threading.Thread(target=self._write, daemon=True).start()
        try:
            self._serve()
        finally:
            with suppress(queue.Full):
                self._outbox.put_nowait(b"")

    def _serve(self) -> None:
        while (left_s := self._heard_s + self._lease_s - time.monotonic()) > 0:
            ready, _, _ = select.select([self._source], [], [], left_s)
            if not ready:
                continue
            chunk = os.read(self._source, _CHUNK)
            if not chunk:
                return
            self._heard_s = time.monotonic()
            *lines, self._buffer = (self._buffer + chunk).split(b"\n")
            for line in lines:
                message = decode(line)
                if message is not None:
                    self._obey(message)

    def _obey(self, message: Message) -> None:
        do, name = message.get("do"), str(message.get("id"))
        if do == "beat":
            self._tell_if_room({"is": "beat", "n": message.get("n"), "time_s": time.time()})
        elif do == "hello":
            self._tell(_introduction(message))
        elif do == "start":
            try:
                self._start(name, message)
            except (OSError, ValueError) as error:
                self._tell({"is": "problem", "id": name, "text": str(error)})
                self._tell({"is": "ended", "id": name, "code": 70})
        elif name in self._children:
            self._handle(self._children[name], message)

    def _handle(self, child: subprocess.Popen[bytes], message: Message) -> None:
        if message["do"] == "say" and child.stdin is not None:
            with suppress(OSError):  # it has ended, or is ending
                child.stdin.write(json.dumps(message.get("message")).encode() + b"\n")
                child.stdin.flush()
        elif message["do"] == "end":
            child.terminate()
            wait_s = float(str(message.get("grace_s", 0.0)))
            threading.Thread(target=_kill_after, args=(child, wait_s), daemon=True).start()

    def _start(self, name: str, message: Message) -> None:
        module, variables = str(message.get("module")), message.get("environment")
        if not _MODULE.fullmatch(module):
            raise ValueError(f"{module!r} is no part of Paceline")
        directory = Path(str(message.get("directory") or "~")).expanduser()
        if not directory.is_dir():
            raise ValueError(
                f"there is no directory {directory} on {gethostname()}. Name one by dir= in the "
                "hostfile, or copy yours by --sync-code"
            )
        told, tells = os.pipe()
        own = {DESCRIPTOR_VARIABLE: str(tells), PARENT_VARIABLE: str(os.getpid())}
        extra = dict(variables) if isinstance(variables, dict) else {}
        try:
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=directory,
                env={**os.environ, **extra, **own},
                pass_fds=(tells,),
                start_new_session=True,
            )
        finally:
            os.close(tells)
        self._children[name] = child
        self._handle(child, {"do": "say", "message": message.get("payload")})
        threading.Thread(target=self._follow, args=(name, child, told), daemon=True).start()

    def _follow(self, name: str, child: subprocess.Popen[bytes], told: int) -> None:
        """Pass on what a child says and prints, and its end."""
        readers = [
            threading.Thread(target=self._pass_on, args=(name, stream, source), daemon=True)
            for stream, source in (
                ("said", os.fdopen(told, "rb")),
                ("stdout", child.stdout),
                ("stderr", child.stderr),
            )
        ]
        for reader in readers:
            reader.start()
        code = child.wait()
        self._end_leftovers()
        for reader in readers:
            reader.join(_ORPHAN_S)
        self._tell({"is": "ended", "id": name, "code": code})
        self._children.pop(name, None)

    def _end_leftovers(self) -> None:
        """End what children that are gone have left behind; it was adopted by this process."""
        alive = [child.pid for child in self._children.values() if child.poll() is None]
        spared = set(alive)
        for pid in alive:
            with suppress(psutil.NoSuchProcess):
                spared |= {p.pid for p in psutil.Process(pid).children(recursive=True)}
        reap(spared)

    def _pass_on(self, name: str, stream: str, source: IO[bytes]) -> None:
        with source:
            for line in source:
                if stream == "said":
                    said = decode(line)
                    if said is not None:
                        self._tell({"is": "said", "id": name, "message": said})
                else:
                    text = line.decode(errors="replace").rstrip("\n")
                    self._tell({"is": "output", "id": name, "stream": stream, "text": text})

    def _tell(self, message: Message) -> None:
        self._outbox.put(encode(message))

    def _tell_if_room(self, message: Message) -> None:
        """Never wait: the main thread has to go on hearing while nobody reads what is written."""
        with suppress(queue.Full):
            self._outbox.put_nowait(encode(message))

    def _write(self) -> None:
        while line := self._outbox.get():
            try:
                while line:
                    line = line[os.write(self._target, line) :]
            except OSError:
                return  # the launcher has gone; the main thread hears of it


def _kill_after(child: subprocess.Popen[bytes], wait_s: float) -> None:
    try:
        child.wait(wait_s)
    except subprocess.TimeoutExpired:
        child.kill()


def _introduction(message: Message) -> Message:
    return {
        "is": "ready",
        "nonce": message.get("nonce"),
        "host": gethostname(),
        "paceline": __version__,
        "python": platform.python_version(),
        "torch": _version_of("torch"),
        "executable": sys.executable,
        "ssh_address": _ssh_address(os.environ),
    }


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _ssh_address(environment: Mapping[str, str]) -> str:
    """Give the address of this host at which ssh came in; empty where ssh doesn't say."""
    words = environment.get("SSH_CONNECTION", "").split()
    return words[2].partition("%")[0] if len(words) == 4 else ""


def main() -> None:
    """Be the guard: standard input and output are the connection."""
    target = os.dup(1)
    os.dup2(2, 1)  # what anything prints by mistake must not look like a message
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: _leave())
    adopt_orphans(True)
    try:
        Guard(0, target).run()
    finally:
        _leave()


def _leave() -> None:
    """Kill everything that was started, and end at once: no thread may hold this up."""
    for _ in range(3):  # what is killed may have been about to start something
        reap(set())
    os._exit(0)


if __name__ == "__main__":
    main()
