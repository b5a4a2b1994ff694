"""An AWS account for tests: moto's server in a process of its own, asked over HTTP."""

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from paceline.launch.aws_client import Aws, connect
from tests.launch.waiting import patient

PUBLIC_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJAEMAwcnMbkMJjBp0X8x0CSKud1ULC/hD2gOwUp9K94 me"
_SERVER = Path(__file__).with_name("server.py")


@dataclass(frozen=True)
class Account:
    """The account."""

    url: str

    def environment(self, home: Path) -> dict[str, str]:
        """Variables with which boto3 asks this account and no other."""
        return {
            "HOME": str(home),
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": str(home / "none"),
            "AWS_SHARED_CREDENTIALS_FILE": str(home / "none"),
        }

    def aws(self) -> Aws:
        """Connect to it: once, since boto3 reads its large models for every connection."""
        return _connected(self.url)

    def reset(self) -> None:
        """Empty it, and end all faults."""
        self._post("/moto-api/reset", {})
        self.faults()

    def faults(self, **faults: object) -> None:
        """Say what goes wrong from now on; nothing else does."""
        self._post("/faults", faults)

    def _post(self, path: str, content: Mapping[str, object]) -> None:
        request = urllib.request.Request(self.url + path, json.dumps(content).encode())
        with urllib.request.urlopen(request, timeout=patient(30)) as answer:
            answer.read()


@cache
def _connected(url: str) -> Aws:
    return connect()


@contextmanager
def served() -> Iterator[Account]:
    """Start the server on a free port, and end it."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(_SERVER)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "MOTO_EC2_LOAD_DEFAULT_AMIS": "true"},
    )
    try:
        assert process.stdout is not None
        yield Account(f"http://127.0.0.1:{int(process.stdout.readline())}")
    finally:
        process.kill()
        process.communicate()


def own_home(home: Path) -> Path:
    """Make a home with a public key in it."""
    (home / ".ssh").mkdir(parents=True, mode=0o700)
    (home / ".ssh/id_ed25519.pub").write_text(PUBLIC_KEY + "\n")
    (home / ".ssh/id_ed25519").write_text("private\n")
    return home


def emptied(moto: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Account:
    """Empty an account, and point boto3 to it; the home has a key."""
    moto.reset()
    for name, value in moto.environment(own_home(tmp_path / "home")).items():
        monkeypatch.setenv(name, value)
    return moto
