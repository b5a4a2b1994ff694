"""The launcher's end: one ssh connection a host, and the processes started through it."""

import queue
import secrets
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal, final

from paceline._version import __version__
from paceline.errors import InfrastructureError
from paceline.launch.hosts.hostfile import Host
from paceline.launch.hosts.options import HostsOptions
from paceline.launch.hosts.ssh import explain, forwarded_port, guard_command
from paceline.launch.hosts.wire import BEAT_S, LEASE_S, Message, decode, encode, read_line

CONNECT_S = 30.0
"""For ssh to connect and the guard to say hello; a host may be slow to import."""
_TAIL_LINES = 30
_WRITE_BACKLOG = 10000
_END_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Introduction:
    """What a host's guard says of itself."""

    host: str
    """Its own name for itself."""
    paceline: str
    python: str
    torch: str
    executable: str
    ssh_address: str
    """Its address at which ssh came in; may be empty."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that came from a process on a host."""

    remote: "Remote"
    kind: Literal["said", "stdout", "stderr", "ended", "lost"]
    """lost: the connection is gone, and the process with it."""
    message: Message
    """Of `said`; `{"text": line}` of output, `{"code": n}` at the end, `{"text": why}` if lost."""


@final
class Remote:
    """A process on a host."""

    def __init__(
        self, connection: "Connection", name: str, inbox: "queue.SimpleQueue[Event]"
    ) -> None:
        self.connection = connection
        self.inbox = inbox
        self._name = name

    @property
    def host(self) -> Host:
        """Where it runs."""
        return self.connection.host

    def say(self, message: Message) -> None:
        """Send a message; lost without a word where the host is."""
        self.connection.send({"do": "say", "id": self._name, "message": message})

    def end(self, grace_s: float = 0.0) -> None:
        """Have it ended: SIGTERM, and SIGKILL to all it has started after `grace_s` seconds."""
        self.connection.send({"do": "end", "id": self._name, "grace_s": grace_s})

    def messages(self, timeout_s: float) -> Iterator[Message]:
        """Go through what it says, until it ends; needs an inbox of its own.

        Args:
            timeout_s: How long it may be silent.

        Raises:
            InfrastructureError: It is silent for longer, failed, or its host is lost.
        """
        printed: deque[str] = deque(maxlen=_TAIL_LINES)
        while True:
            try:
                event = self.inbox.get(timeout=timeout_s)
            except queue.Empty:
                raise InfrastructureError(
                    f"{self.host.name} has said nothing for {timeout_s:g} s"
                ) from None
            if event.kind == "said":
                yield event.message
            elif event.kind == "ended" and event.message["code"] == 0:
                return
            elif event.kind in ("ended", "lost"):
                printed.append(str(event.message.get("text", "")))
                text = "\n".join(filter(None, printed)) or f"code {event.message.get('code')}"
                raise InfrastructureError(f"{self.host.name}: {text}")
            else:
                printed.append(str(event.message["text"]))


@final
class Connection:
    """One host's ssh connection with the guard at its other end."""

    def __init__(self, host: Host, options: HostsOptions, store_port: int | None) -> None:
        """Start ssh; `wait` waits for it."""
        self.host = host
        self.introduction: Introduction | None = None
        self.store_port: int | None = None
        """At which the host reaches the launcher's store, on its loopback address."""
        self.clock_offset_s: float | None = None
        """By how much the host's wall clock is ahead of ours."""
        self.lost = ""
        """Why it is no use any more; empty while it is."""
        self._wants_port = store_port is not None
        self._nonce = secrets.token_hex(8)
        self._remotes: dict[str, Remote] = {}
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._ready = threading.Event()
        self._outbox: queue.Queue[bytes | None] = queue.Queue(_WRITE_BACKLOG)
        self._heard_s = time.monotonic()
        self._sent_s: dict[int, float] = {}
        self._beats = 0
        self._started = 0
        self._lock = threading.Lock()
        self._ssh = subprocess.Popen(
            guard_command(host, options, store_port),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is the launcher's to pass on
        )
        self._threads = [
            threading.Thread(target=work, name=f"paceline-{host.name}", daemon=True)
            for work in (self._read, self._read_errors, self._write, self._beat)
        ]
        for thread in reversed(self._threads):  # the first one waits for the second at its end
            thread.start()
        self.send({"do": "hello", "nonce": self._nonce, "paceline": __version__})

    def wait(self, timeout_s: float = CONNECT_S) -> bool:
        """Wait until the guard has answered. Returns whether it has; `lost` says why not."""
        deadline_s = time.monotonic() + timeout_s
        while not self.lost and time.monotonic() < deadline_s:
            known = self.store_port is not None or not self._wants_port
            if self._ready.wait(0.05) and known and self.clock_offset_s is not None:
                return True
        if not self.lost:
            self._lose(f"{self.host.name}: no answer in {timeout_s:g} s")
        return False

    def start(
        self,
        module: str,
        payload: Message,
        environment: Mapping[str, str] | None = None,
        inbox: "queue.SimpleQueue[Event] | None" = None,
    ) -> Remote:
        """Start `python -m MODULE` on the host.

        Args:
            module: One of Paceline's that begins with `child.payload()`.
            payload: What that gives.
            environment: Variables to set. No secrets: other users can list them.
            inbox: Where its events go; None: one of its own.
        """
        with self._lock:
            self._started += 1
            name = str(self._started)
            remote = Remote(self, name, queue.SimpleQueue() if inbox is None else inbox)
            self._remotes[name] = remote
        self.send(
            {
                "do": "start",
                "id": name,
                "module": module,
                "payload": payload,
                "directory": self.host.directory,
                "environment": dict(environment or {}),
            }
        )
        if self.lost:
            self._tell_lost()
        return remote

    def send(self, message: Message) -> None:
        """Send a message to the guard; lost without a word where the host is."""
        with suppress(queue.Full):
            self._outbox.put_nowait(encode(message))

    def close(self) -> None:
        """End the connection; the guard ends all that it has started."""
        if not self.lost:
            self.lost = "closed"
        self._outbox.put(None)
        try:
            self._ssh.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._ssh.kill()
            self._ssh.wait()
        for thread in self._threads:
            thread.join(_END_S)
        for stream in (self._ssh.stdout, self._ssh.stderr):
            if stream is not None:
                stream.close()

    def _read(self) -> None:
        stream = self._ssh.stdout
        assert stream is not None
        with suppress(OSError, ValueError, InfrastructureError):
            while line := read_line(stream):
                message = decode(line)
                if message is None:
                    self._tail.append(line.decode(errors="replace").rstrip())
                elif self._ready.is_set() or message.get("nonce") == self._nonce:
                    self._heard_s = time.monotonic()
                    self._take(message)
        with suppress(subprocess.TimeoutExpired):
            self._ssh.wait(_END_S)
        self._threads[1].join(_END_S)  # it may have to say why
        self._lose(explain(self.host, self._ssh.poll(), "\n".join(self._tail)))

    def _read_errors(self) -> None:
        stream = self._ssh.stderr
        assert stream is not None
        with suppress(OSError, ValueError):
            for line in stream:
                text = line.decode(errors="replace").rstrip()
                port = forwarded_port(text)
                if port is None:
                    self._tail.append(text)
                else:
                    self.store_port = port

    def _write(self) -> None:
        stream = self._ssh.stdin
        assert stream is not None
        with suppress(OSError):
            while (line := self._outbox.get()) is not None:
                stream.write(line)
                stream.flush()
        with suppress(OSError):
            stream.close()

    def _beat(self) -> None:
        while not self.lost:
            if self._ready.is_set():
                self._beats += 1
                self._sent_s[self._beats] = time.time()
                self.send({"do": "beat", "n": self._beats})
                if time.monotonic() - self._heard_s > LEASE_S:
                    self._lose(f"{self.host.name}: no sign of life for {LEASE_S:g} s")
            self._ready.wait(0.2)
            end_s = time.monotonic() + (BEAT_S if self._ready.is_set() and self._beats else 0.2)
            while not self.lost and time.monotonic() < end_s:
                time.sleep(0.1)

    def _take(self, message: Message) -> None:
        what, name = message.get("is"), str(message.get("id"))
        if what == "ready":
            self.introduction = Introduction(
                **{n: str(message.get(n, "")) for n in Introduction.__dataclass_fields__}
            )
            self._ready.set()
        elif what == "beat":
            self._set_clock(message)
        elif name in self._remotes:
            self._pass_on(self._remotes[name], message)

    def _pass_on(self, remote: Remote, message: Message) -> None:
        what = message["is"]
        if what == "said" and isinstance(message["message"], dict):
            remote.inbox.put(Event(remote=remote, kind="said", message=message["message"]))
        elif what == "output":
            kind: Literal["stdout", "stderr"] = "stdout"
            if message["stream"] == "stderr":
                kind = "stderr"
            remote.inbox.put(Event(remote=remote, kind=kind, message={"text": message["text"]}))
        elif what == "problem":
            remote.inbox.put(Event(remote=remote, kind="stderr", message={"text": message["text"]}))
        elif what == "ended":
            self._remotes.pop(str(message["id"]), None)
            remote.inbox.put(Event(remote=remote, kind="ended", message={"code": message["code"]}))

    def _set_clock(self, message: Message) -> None:
        sent_s = self._sent_s.pop(int(str(message.get("n"))), None)
        if sent_s is not None and self.clock_offset_s is None:
            self.clock_offset_s = float(str(message["time_s"])) - (sent_s + time.time()) / 2

    def _lose(self, why: str) -> None:
        with self._lock:
            if self.lost:
                return
            self.lost = why
        with suppress(ProcessLookupError):
            self._ssh.kill()
        self._tell_lost()

    def _tell_lost(self) -> None:
        with self._lock:
            remotes, self._remotes = list(self._remotes.values()), {}
        for remote in remotes:
            remote.inbox.put(Event(remote=remote, kind="lost", message={"text": self.lost}))


@final
class Fleet:
    """The connections to all hosts of a training."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self._connections = list(connections)

    @property
    def hosts(self) -> list[Connection]:
        """Those that are of use, in the order in which the hosts were named."""
        return [connection for connection in self._connections if not connection.lost]

    @property
    def lost(self) -> dict[str, str]:
        """Why the others aren't, by the host's name."""
        return {c.host.name: c.lost for c in self._connections if c.lost}

    def replace(self, connections: Sequence[Connection]) -> None:
        """Go on with these connections alone, in this order; closing others is the caller's."""
        self._connections = list(connections)

    def close(self) -> None:
        """End all connections."""
        with ThreadPoolExecutor(max(1, len(self._connections))) as pool:
            list(pool.map(Connection.close, self._connections))


@contextmanager
def connect(
    hosts: Sequence[Host],
    options: HostsOptions,
    store_port: int | None = None,
    say: Callable[[str], None] | None = None,
) -> Iterator[Fleet]:
    """Connect to all hosts at once; on leaving, everything that was started on them is ended.

    Args:
        hosts: Which.
        options: How ssh reaches them.
        store_port: Port of this machine's loopback address that the hosts are to reach.
        say: Is told of each host that can't be reached.

    Yields:
        The connections; hosts that can't be reached are in `lost`.
    """
    fleet = Fleet([Connection(host, options, store_port) for host in hosts])
    try:
        wait_for(fleet.hosts)
        for why in fleet.lost.values():
            if say is not None:
                say(why)
        yield fleet
    finally:
        fleet.close()


def wait_for(connections: Sequence[Connection]) -> None:
    """Wait until each connection is of use or lost; one of another Paceline is lost."""
    deadline_s = time.monotonic() + CONNECT_S
    for connection in connections:
        connection.wait(max(0.0, deadline_s - time.monotonic()))
        said = connection.introduction
        if said is not None and said.paceline != __version__:
            connection._lose(
                f"{connection.host.name}: Paceline {said.paceline} is installed there, and "
                f"{__version__} here. Install the same, or say --install"
            )
