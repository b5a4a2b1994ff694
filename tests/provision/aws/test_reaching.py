"""Waiting for nodes, the caller's address, and the key to log in with."""

import http.server
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from paceline.errors import InfrastructureError, UsageError
from paceline.provision.aws.hostkeys import wait_for_ssh
from paceline.provision.aws.ssh_access import callers_network, read_key
from paceline.provision.aws.waiter import Waiter, never
from tests.provision.aws.account import PUBLIC_KEY


@contextmanager
def greeting(text: bytes) -> Iterator[int]:
    """Listen on a port and greet who comes, as ssh servers do."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(text)

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        thread.join()


def test_a_node_answers_as_ssh_does() -> None:
    with greeting(b"SSH-2.0-OpenSSH_9.2\r\n") as port:
        wait_for_ssh(["127.0.0.1"], Waiter(never, every_s=0.01), 30.0, port)


def test_what_answers_otherwise_is_no_node() -> None:
    silent = pytest.raises(InfrastructureError, match=r"no ssh server answers at 127\.0\.0\.1")
    with greeting(b"HTTP/1.1 400\r\n") as port, silent:
        wait_for_ssh(["127.0.0.1"], Waiter(never, every_s=0.01), 0.0, port)


def test_waiting_ends_with_a_signal() -> None:
    asked = 0

    def interrupted() -> bool:
        nonlocal asked
        asked += 1
        return asked > 3

    waiter = Waiter(interrupted, every_s=0.01)
    with pytest.raises(KeyboardInterrupt):
        waiter.until(lambda: None, 60.0)


def test_waiting_asks_once_more_at_the_end() -> None:
    answers = iter([None, "late"])
    assert Waiter(never, every_s=0.01).until(lambda: next(answers), 0.01) == "late"
    asked = []

    def ask() -> None:
        asked.append(1)
        assert len(asked) < 3, "there is no more time"

    assert Waiter(never).until(ask, 0.0) is None
    assert len(asked) == 1


class Checkip(http.server.BaseHTTPRequestHandler):
    answer = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.answer)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def service(answer: bytes) -> Iterator[str]:
    Checkip.answer = answer
    with http.server.HTTPServer(("127.0.0.1", 0), Checkip) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        thread.join()


def test_the_callers_address_is_asked_for() -> None:
    with service(b"192.0.2.7\n") as url:
        assert callers_network(url) == "192.0.2.7/32"


@pytest.mark.parametrize("answer", [b"", b"<html>login</html>", b"0.0.0.0/0", b"::1\n"])
def test_an_answer_that_is_no_address_is_refused(answer: bytes) -> None:
    with service(answer) as url, pytest.raises(InfrastructureError, match="--allow-ssh-from"):
        callers_network(url)


def test_keys_are_read_with_their_private_half(tmp_path: Path) -> None:
    public = tmp_path / "id.pub"
    public.write_text(PUBLIC_KEY + "\n")
    assert read_key(public).private_file is None
    (tmp_path / "id").write_text("private")
    key = read_key(public)
    assert (key.public_key, key.private_file) == (PUBLIC_KEY, tmp_path / "id")


@pytest.mark.parametrize(
    "text", ["", "-----BEGIN OPENSSH PRIVATE KEY-----\nx", "ssh-dss AAAA me", f"{PUBLIC_KEY}\nmore"]
)
def test_what_is_no_public_key_is_never_sent(tmp_path: Path, text: str) -> None:
    path = tmp_path / "id.pub"
    path.write_text(text)
    with pytest.raises(UsageError, match="isn't a public key"):
        read_key(path)
