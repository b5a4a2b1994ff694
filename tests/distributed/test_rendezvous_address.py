"""Names that only Slurm knows; tests/hosts/test_slurm.py has them on a real one."""

from pathlib import Path

import pytest

from paceline.distributed.address import Address
from paceline.distributed.rendezvous_address import known_address, node_address

SHOWN = "NodeName=n1 Arch=x86_64 NodeAddr=10.77.0.11 NodeHostName=h1 Version=22.05.8\n"


def test_what_slurm_shows() -> None:
    assert node_address(SHOWN) == "10.77.0.11"
    assert node_address("Node n9 not found\n") is None


@pytest.mark.parametrize(
    ("host", "found"), [("no-such-host.invalid", "10.77.0.11"), ("127.0.0.1", "127.0.0.1")]
)
def test_slurm_is_asked_where_the_resolver_knows_nothing(
    host: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    standin = tmp_path / "scontrol"
    standin.write_text(f"#!/bin/sh\nprintf '%s' '{SHOWN}'\n")
    standin.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    address = Address(scheme="tcp", host=host, port=20815)
    assert known_address(address) == Address(scheme="tcp", host=found, port=20815)


def test_without_slurm_the_name_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    address = Address(scheme="tcp", host="no-such-host.invalid", port=20815)
    assert known_address(address) == address
