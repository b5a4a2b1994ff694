"""The launcher's end of hosts: their ssh connections, and the processes started through these."""

import os
import queue
import secrets
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Literal, final

from paceline._version import __version__
from paceline.errors import InfrastructureError
from paceline.launch.ssh.hostfile import Host
from paceline.launch.ssh.options import HostsOptions
from paceline.launch.ssh.protocol import HEARTBEAT_S, LEASE_S, Message, decode, encode, lines_of
from paceline.launch.ssh.ssh import (
    AGENT_HERE,
    agent_command,
    explain,
    forwarded_port,
    forwarding_failed,
)

CONNECT_S = 30.0
"""For ssh to connect and the agent to say hello; a host may be slow to import."""
_TAIL_LINES = 30
_WRITE_BACKLOG = 10000
_END_S = 2.0
_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that came from a process on a host."""

    remote: "RemoteProcess"
    kind: Literal["message", "stdout", "stderr", "ended", "lost"]
    """lost: the connection is gone, and the process with it."""
    message: Message
    """Its own; `{"text": line}` of output, `{"code": n}` at the end, `{"text": why}` if lost."""


@final
class RemoteProcess:
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

    def send(self, message: Message) -> None:
        """Send a message; dropped silently where the host is lost."""
        self.connection.send({"do": "say", "id": self._name, "message": message})

    def end(self) -> None:
        """Have it killed, with all that it has started."""
        self.connection.send({"do": "end", "id": self._name})

    def messages(self, timeout_s: float) -> Iterator[Message]:
        """Iterate over its messages until it ends; needs an inbox of its own.

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
            if event.kind == "message":
                yield event.message
            elif event.kind == "ended" and event.message["code"] == 0:
                return
            elif event.kind in ("ended", "lost"):
                printed.append(str(event.message.get("text", "")))
                text = "\n".join(filter(None, printed)) or f"code {event.message.get('code')}"
                raise InfrastructureError(f"{self.host.name}: {text}")
            else:
                # Output is no message, but explains a failure.
                printed.append(str(event.message["text"]))


@dataclass(frozen=True, kw_only=True)
class AgentInfo:
    """A host agent's first message."""

    paceline: str
    """The version that is installed there."""
    ssh_address: str
    """Its address at which ssh came in; may be empty."""


@final
class Connection:
    """One host's ssh connection with the agent at its other end.

    One object, since its four threads share one state under one lock: ready, lost or gone.
    """

    def __init__(
        self,
        host: Host,
        options: HostsOptions,
        store_port: int | None,
        *,
        any_version: bool = False,
        here: bool = False,
    ) -> None:
        """Start ssh; `wait` waits for it.

        Args:
            store_port: Port of this machine's loopback address that the host is to reach, if any.
            any_version: Whether another version of Paceline there will do.
            here: The host is this machine: no ssh.
        """
        self.host = host
        self._config = options.ssh_config
        self.introduction: AgentInfo | None = None
        self.store_port: int | None = None
        """At which the host reaches the launcher's store, on its loopback address."""
        self.clock_offset_s: float | None = None
        """By how much the host's wall clock is ahead of ours."""
        self.lost = ""
        """Why it was lost; empty while it wasn't."""
        self._wants_port = store_port is not None
        self._any_version = any_version
        self._nonce = secrets.token_hex(8)
        self._remotes: dict[str, RemoteProcess] = {}
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._introduced = threading.Event()  # or lost
        self._settled = threading.Event()  # ready or lost
        self._gone = threading.Event()
        self._outbox: queue.Queue[bytes | None] = queue.Queue(_WRITE_BACKLOG)
        self._begun_s = self._received_s = time.monotonic()
        self._sent_s: dict[int, float] = {}
        self._started = 0
        self._lock = threading.Lock()
        self._ssh = subprocess.Popen(
            AGENT_HERE if here else agent_command(host, options, store_port),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is the launcher's to pass on
        )
        # Four threads, one for each pipe and one for the heartbeat, so that none can block another.
        self._threads = [
            threading.Thread(target=work, name=f"paceline-{host.name}", daemon=True)
            for work in (self._read, self._read_errors, self._write, self._send_heartbeats)
        ]
        for thread in reversed(self._threads):  # the first one waits for the second at its end
            thread.start()
        self.send({"do": "hello", "nonce": self._nonce, "paceline": __version__})

    @property
    def is_ready(self) -> bool:
        """Whether it can be used: the agent has answered, clock offset and store port are known."""
        has_port = self.store_port is not None or not self._wants_port
        is_known = self.introduction is not None and self.clock_offset_s is not None
        return is_known and has_port and not self.lost

    def wait(self, timeout_s: float = CONNECT_S, over: threading.Event | None = None) -> bool:
        """Wait until it is ready or lost.

        Args:
            timeout_s: After so long without an answer it is lost.
            over: Once it is set, this returns.

        Returns:
            Whether it is ready; if not, `lost` says why.
        """
        deadline_s = time.monotonic() + timeout_s
        while not self._settled.is_set() and not (over is not None and over.is_set()):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                waited_s = time.monotonic() - self._begun_s
                self._lose(f"{self.host.name}: no answer in {waited_s:.0f} s")
            else:
                self._settled.wait(left_s if over is None else min(left_s, _POLL_S))
        return self.is_ready

    def start(
        self,
        module: str,
        payload: Message,
        inbox: "queue.SimpleQueue[Event] | None" = None,
    ) -> RemoteProcess:
        """Start `python -m MODULE` on the host.

        Args:
            module: One of Paceline's that begins with `child.payload()`.
            inbox: Where its events go; None: one of its own.
        """
        # Registered before it is sent: the answer may come at once.
        with self._lock:
            self._started += 1
            name = str(self._started)
            remote = RemoteProcess(self, name, queue.SimpleQueue() if inbox is None else inbox)
            self._remotes[name] = remote
        self.send(
            {
                "do": "start",
                "id": name,
                "module": module,
                "payload": payload,
                "directory": self.host.directory,
            }
        )
        # Lost in between: `_lose` may have reported before this one was registered.
        if self.lost:
            self._report_lost()
        return remote

    def send(self, message: Message) -> None:
        """Send a message to the agent; dropped silently where the host is lost."""
        if not self.lost:
            with suppress(queue.Full):
                self._outbox.put_nowait(encode(message))

    def close(self) -> None:
        """End the connection, once or again; the agent ends all that it has started."""
        with self._lock:
            self.lost = self.lost or "closed"
        # Close ssh's input, which ends the agent; then wait for ssh; then for the threads.
        self._retire()
        try:
            self._ssh.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._kill()
            with suppress(subprocess.TimeoutExpired):
                self._ssh.wait(_END_S)
        for thread in self._threads:
            thread.join(_END_S)
        for stream in (self._ssh.stdin, self._ssh.stdout, self._ssh.stderr):
            if stream is not None:
                stream.close()

    def _read(self) -> None:
        stream = self._ssh.stdout
        assert stream is not None
        try:
            with stream:
                for line in lines_of(stream, self._note_life):
                    self._take_line(line)
        except (InfrastructureError, OSError) as error:
            self._lose(f"{self.host.name}: {error}")
        except (KeyError, TypeError, ValueError) as error:
            self._lose(f"{self.host.name}: it said what nobody understands: {error!r}")
        with suppress(subprocess.TimeoutExpired):
            self._ssh.wait(_END_S)
        # The output has ended. ssh's exit code and its last words say why.
        self._threads[1].join(_END_S)  # it may have to say why
        self._lose(self._explanation())

    def _note_life(self) -> None:
        self._received_s = time.monotonic()

    def _explanation(self) -> str:
        output = "\n".join(self._tail.copy())
        return explain(self.host, self._ssh.poll(), output, config=self._config)

    def _read_errors(self) -> None:
        stream = self._ssh.stderr
        assert stream is not None
        with suppress(OSError, ValueError, InfrastructureError), stream:
            for line in lines_of(stream):
                text = line.decode(errors="replace").rstrip()
                # ssh tells here which port of the host it was given for the store.
                port = forwarded_port(text)
                if port is None:
                    self._tail.append(text)
                else:
                    self.store_port = port
                    self._settle()
                if forwarding_failed(text):
                    self._lose(self._explanation())

    def _write(self) -> None:
        stream = self._ssh.stdin
        assert stream is not None
        with suppress(OSError, ValueError), stream:
            while (line := self._outbox.get()) is not None:
                _write_whole(stream, line)

    def _send_heartbeats(self) -> None:
        self._introduced.wait()
        sent = 0
        while not self._gone.is_set():
            sent += 1
            # Clock offset by one round trip, as in NTP: the host's time against the middle of ours.
            if self.clock_offset_s is None:
                self._sent_s[sent] = time.time()
            self.send({"do": "beat", "n": sent})
            if time.monotonic() - self._received_s > LEASE_S:
                self._lose(f"{self.host.name}: no sign of life for {LEASE_S:g} s")
            self._gone.wait(HEARTBEAT_S)

    def _take_line(self, line: bytes) -> None:
        message = decode(line)
        # A login shell may print anything before the agent's greeting, which has our nonce.
        if message is None:
            self._tail.append(line.decode(errors="replace").rstrip())
        elif self.introduction is not None or message.get("nonce") == self._nonce:
            self._take(message)

    def _take(self, message: Message) -> None:
        what, name = message.get("is"), str(message.get("id"))
        if what == "ready":
            self._take_introduction(message)
        elif what == "beat":
            self._set_clock(message)
        elif name in self._remotes:
            self._pass_on(self._remotes[name], message)

    def _take_introduction(self, message: Message) -> None:
        agent = AgentInfo(**{n: str(message.get(n, "")) for n in AgentInfo.__dataclass_fields__})
        self.introduction = agent
        if agent.paceline != __version__ and not self._any_version:
            self._lose(
                f"{self.host.name}: Paceline {agent.paceline} is installed there, and "
                f"{__version__} here. Install the same, or say --install"
            )
        self._tail.clear()  # what a login shell prints explains no later loss
        self._introduced.set()
        self._settle()

    def _settle(self) -> None:
        if self.is_ready:
            self._settled.set()

    def _pass_on(self, remote: RemoteProcess, message: Message) -> None:
        """Turn a message of the agent into an event of one of its processes."""
        what = message["is"]
        if what == "said" and isinstance(message["message"], dict):
            remote.inbox.put(Event(remote=remote, kind="message", message=message["message"]))
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
            self._settle()

    def _lose(self, why: str) -> None:
        with self._lock:
            if self.lost:
                return
            self.lost = why
        # The first reason counts; later ones follow from it.
        self._kill()
        self._retire()

    def _kill(self) -> None:
        """Kill ssh, and what it has started to get through (ProxyCommand, ProxyJump)."""
        if self._ssh.poll() is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._ssh.pid, signal.SIGKILL)

    def _retire(self) -> None:
        """End the threads, which close their pipes, and report the loss to all that wait."""
        for event in (self._gone, self._introduced, self._settled):
            event.set()
        with suppress(queue.Full):  # a writer with so much before it is at a pipe that will break
            self._outbox.put_nowait(None)
        self._report_lost()

    def _report_lost(self) -> None:
        with self._lock:
            remotes, self._remotes = list(self._remotes.values()), {}
        for remote in remotes:
            remote.inbox.put(Event(remote=remote, kind="lost", message={"text": self.lost}))


def _write_whole(stream: IO[bytes], line: bytes) -> None:
    """Write to an unbuffered stream, which may take a part only."""
    left = memoryview(line)
    while left:
        left = left[stream.write(left) :]


@final
class ConnectionPool:
    """The connections to all hosts of a training."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self._connections = list(connections)

    @property
    def all(self) -> list[Connection]:
        """All connections, lost ones too, in the order in which the hosts were named."""
        return list(self._connections)

    @property
    def hosts(self) -> list[Connection]:
        """Connections that aren't lost, in the order in which the hosts were named."""
        return [connection for connection in self._connections if not connection.lost]

    @property
    def lost(self) -> dict[str, str]:
        """Why connections were lost, by the host's name."""
        return {c.host.name: c.lost for c in self._connections if c.lost}

    @property
    def lost_ones(self) -> list[Connection]:
        """Connections that are lost."""
        return [connection for connection in self._connections if connection.lost]

    def replace(self, connections: Sequence[Connection]) -> None:
        """Go on with these connections alone, in this order; closing others is the caller's."""
        self._connections = list(connections)

    def close(self) -> None:
        """End all connections."""
        _close(self._connections)


@contextmanager
def connect(
    hosts: Sequence[Host],
    options: HostsOptions,
    store_port: int | None = None,
    *,
    any_version: bool = False,
    here: bool = False,
) -> Iterator[ConnectionPool]:
    """Connect to all hosts at once; on leaving, everything that was started on them is ended.

    Args:
        store_port: Port of this machine's loopback address that the hosts are to reach.
        any_version: Whether another version of Paceline there will do.
        here: The hosts are this machine: no ssh.

    Yields:
        The connections; hosts that can't be reached are in `lost`.
    """
    made: dict[int, Connection] = {}
    connections = ConnectionPool([])

    def make(place: int) -> None:
        made[place] = Connection(
            hosts[place], options, store_port, any_version=any_version, here=here
        )

    try:
        # In threads, which no signal interrupts between the start of an ssh and the note of it.
        with ThreadPoolExecutor(max(1, len(hosts))) as pool:
            list(pool.map(make, range(len(hosts))))
        connections.replace([made[place] for place in range(len(hosts))])
        # All connect at the same time, so one deadline holds for all.
        wait_for(connections.hosts)
        yield connections
    finally:
        # Those that were made before an error, then those that came later by `replace`.
        _close(list(made.values()))
        connections.close()


def wait_for(connections: Sequence[Connection]) -> None:
    """Wait until each connection is ready or lost; those without an answer in time are lost."""
    deadline_s = time.monotonic() + CONNECT_S
    for connection in connections:
        connection.wait(max(0.0, deadline_s - time.monotonic()))


def _close(connections: Sequence[Connection]) -> None:
    with ThreadPoolExecutor(max(1, len(connections))) as pool:
        list(pool.map(Connection.close, connections))
