"""A server that plays a training job at SageMaker, to which boto3 is pointed."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.launch.waiting import patient
from tests.provision.aws.account import Account, own_home

NAME = "paceline-digits-abc123"


class Job:
    """A training job as a server plays it: what each operation answers, and what was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Mapping[str, Any]]] = []
        self.changed = threading.Condition()
        self.answers: dict[str, Callable[[int], tuple[int, Mapping[str, Any]]]] = {
            "CreateTrainingJob": lambda _: (200, {"TrainingJobArn": "arn:x"}),
            "DescribeLogStreams": lambda _: (200, {"logStreams": []}),
            "PutObject": lambda _: (200, {}),
            "DeleteObject": lambda _: (200, {}),
        }

    def count(self, operation: str) -> int:
        with self.changed:
            return sum(name == operation for name, _ in self.asked)

    def wait_for(self, operation: str) -> None:
        with self.changed:
            asked = self.changed.wait_for(
                lambda: any(name == operation for name, _ in self.asked), timeout=patient(30)
            )
        assert asked, operation

    def answer(self, operation: str, content: Mapping[str, Any]) -> tuple[int, Mapping[str, Any]]:
        before = self.count(operation)
        with self.changed:
            self.asked.append((operation, content))
            self.changed.notify_all()
        return self.answers[operation](before)


@contextmanager
def served_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """Play a job for the block."""
    played = Job()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # boto3 waits a second for an older one

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            content = json.loads(self.rfile.read(length) or b"{}")
            operation = self.headers["X-Amz-Target"].rpartition(".")[2]
            self._send(*played.answer(operation, content))

        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self._send(*played.answer("PutObject", {"path": self.path}))

        def do_DELETE(self) -> None:
            self._send(*played.answer("DeleteObject", {"path": self.path}))

        def _send(self, code: int, content: Mapping[str, Any]) -> None:
            body = json.dumps(content).encode() if content else b""
            self.send_response(code)
            self.send_header("Content-Type", "application/x-amz-json-1.1")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    account = Account(f"http://127.0.0.1:{server.server_address[1]}")
    for name, value in account.environment(own_home(tmp_path / "home")).items():
        monkeypatch.setenv(name, value)
    try:
        yield played
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def state(status: str, detail: str = "", reason: str = "") -> dict[str, Any]:
    return {
        "TrainingJobName": NAME,
        "TrainingJobStatus": status,
        "SecondaryStatus": detail or status,
        "FailureReason": reason,
        "SecondaryStatusTransitions": [
            {"Status": detail or status, "StartTime": 1.0, "StatusMessage": f"it is {detail}"}
        ],
    }
