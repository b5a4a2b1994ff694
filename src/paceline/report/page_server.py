"""Serves a run's page, made again when the run's files have changed; see `paceline report --watch`.

Only who has the URL can read it: its path is a secret, so that other users of the machine, and
pages of other origins in the same browser, find nothing.
"""

import hashlib
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import final

from paceline.errors import UsageError

_MIN_S, _FACTOR = 2.0, 10.0
"""Pages are made at most so often, and so many times as long apart as one takes: a training may
need the processor."""
_WATCHED = ("*.json", "*.csv", "evaluation/*.json", "logs/*.json", "snapshots")
_TIMEOUT_S = 30.0


def version_of(directory: Path, state: str = "") -> str:
    """Say what files of a run there are, as far as its page shows them: another text, another page.

    Args:
        state: What else the page depends on.
    """
    found = [f"{path.name} {_stamp(path)}" for path in _watched(directory)]
    return hashlib.sha256("\n".join([state, *found]).encode(errors="replace")).hexdigest()[:16]


def _watched(directory: Path) -> Iterator[Path]:
    for pattern in _WATCHED:
        with suppress(OSError):
            yield from sorted(p for p in directory.glob(pattern) if not p.name.startswith("."))


def _stamp(path: Path) -> str:
    try:
        status = path.stat()
    except OSError:
        return ""
    return f"{status.st_mtime_ns} {status.st_size}"


@final
class FollowedPage:
    """A page that is made again when what it shows has changed; used by several threads."""

    def __init__(self, find_version: Callable[[], str], render: Callable[[str], str]) -> None:
        """Create the followed page.

        Args:
            find_version: Names what there is to show.
            render: Makes the page of a version.
        """
        self._find_version = find_version
        self._render = render
        self._lock = Lock()
        self._version, self._page = "", b""
        self._next_at = 0.0

    def current(self) -> tuple[str, bytes]:
        """Give the version that the page shows and the page itself, made again where it is due."""
        with self._lock:
            version = self._find_version()
            began = time.monotonic()
            if version != self._version and began >= self._next_at:
                self._page = self._render(version).encode("utf-8", errors="replace")
                self._version = version
                took = time.monotonic() - began
                self._next_at = began + took + max(_MIN_S, _FACTOR * took)
            return self._version, self._page


@final
class PageServer(ThreadingHTTPServer):
    """Serves a page at one secret path, and beside it the version that it shows."""

    daemon_threads = True

    def __init__(self, page: FollowedPage, host: str, port: int) -> None:
        """Listen; serves nothing yet.

        Args:
            port: 0 for a free one.

        Raises:
            UsageError: Nothing can listen there.
        """
        self.page = page
        self.host = host
        self.path = f"/{secrets.token_urlsafe(16)}/"
        try:
            self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError, UnicodeError) as error:
            raise UsageError(f"can't listen on {host}, port {port}: {error}") from error

    @property
    def url(self) -> str:
        """Where the page is."""
        name = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{name}:{self.server_port}{self.path}"

    def server_bind(self) -> None:
        """Bind without asking a name server who we are, as the base does; that may take long."""
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self.host, self.server_address[1]


@final
class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = _TIMEOUT_S

    def do_GET(self) -> None:
        """Serve the page, and its version, to those who know the secret path; nothing else."""
        base = self.server.path
        if secrets.compare_digest(self.path.encode(), base.encode()):
            self._answer("text/html; charset=utf-8", self.server.page.current()[1])
        elif secrets.compare_digest(self.path.encode(), f"{base}version".encode()):
            self._answer("text/plain; charset=utf-8", self.server.page.current()[0].encode())
        else:
            self.send_error(404)

    def _answer(self, kind: str, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        with suppress(ConnectionError):  # a page that was closed meanwhile
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing of requests: the path is a secret."""
