"""Keys, addresses and files for ssh, read back by the programs that read them."""

import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

from paceline.errors import InfrastructureError, UsageError
from paceline.launch.ssh.hostfile import parse_hostfile
from paceline.provision.aws.ssh import (
    callers_network,
    directory_of,
    find_key,
    forget_files,
    hostfile_text,
    read_host_keys,
    ssh_config_text,
    write_files,
)
from paceline.provision.aws.stack import Node, Stack
from tests.launch.waiting import patient
from tests.provision.aws.account import PUBLIC_KEY
from tests.support.needs import SSH, need

STACK = Stack(
    id="s",
    status="",
    tags={},
    outputs={"Slots": "4", "Login": "ubuntu", "Python": "/opt/pytorch/bin/python"},
)


def node(index: int, public: str) -> Node:
    return Node(
        id=f"i-{index}",
        name=f"Node{index}",
        state="running",
        instance_type="g5.12xlarge",
        launched=datetime(2026, 11, 21, tzinfo=UTC),
        private_address=f"10.77.0.{index + 5}",
        public_address=public,
        interface="",
    )


NODES = [node(0, "192.0.2.1"), node(1, "")]


def run(*words: str | Path) -> str:
    need(SSH)
    done = subprocess.run(words, capture_output=True, text=True, timeout=patient(30))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_hostfile_is_one() -> None:
    first, second = parse_hostfile(hostfile_text(STACK, NODES))
    assert (first.name, first.slots, first.user, first.port) == ("192.0.2.1", 4, "ubuntu", 22)
    assert (first.address, first.python) == ("10.77.0.5", "/opt/pytorch/bin/python")
    assert second.name == second.address == "10.77.0.6"


@pytest.mark.slow
def test_ssh_reads_the_configuration(tmp_path: Path) -> None:
    directory, key = tmp_path / "50% known", tmp_path / "my key"
    config = tmp_path / "config"
    keys = {node.address: ["ssh-ed25519 AAAA"] for node in NODES}
    config.write_text(ssh_config_text(directory, "ubuntu", keys, NODES, key))
    read = run("ssh", "-G", "-F", config, "192.0.2.1").splitlines()
    assert {"user ubuntu", f"userknownhostsfile {directory}/known_hosts"} <= set(read)
    assert f"identityfile {key}" in read
    assert any(line.startswith("stricthostkeychecking") and "ask" not in line for line in read)
    partial = ssh_config_text(directory, "ubuntu", {}, NODES, None)
    assert "StrictHostKeyChecking" not in partial


@pytest.mark.slow
def test_host_keys_are_read_from_a_console(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "root@ip", "-f", tmp_path / "key")
    public = (tmp_path / "key.pub").read_text().strip()
    words = ("BEGIN", "END")
    begin, end = (f"-----{word} SSH HOST KEY KEYS-----" for word in words)
    console = f"[ 12.3] x\n{begin}\n{public}\nssh-rsa nonsense me\n{end}\nlogin: "
    found = read_host_keys(console.replace("\n", "\r\n"))
    assert found == [" ".join(public.split()[:2])]
    assert read_host_keys(f"{begin}\n{public}") == []  # not all of it yet
    write_files(STACK, "c", NODES, {"192.0.2.1": found}, tmp_path / "key.pub")
    directory = directory_of("c")
    assert found[0] in run("ssh-keygen", "-F", "192.0.2.1", "-f", directory / "known_hosts")
    assert f'IdentityFile "{tmp_path}/key"' in (directory / "ssh_config").read_text()
    forget_files("c")
    assert not directory.exists()
    forget_files("c")


@pytest.mark.parametrize("text", ["", "-----BEGIN OPENSSH PRIVATE KEY-----\nx", "ssh-dss AAAA me"])
def test_only_a_public_key_is_sent(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UsageError, match=r"id_ed25519\.pub"):
        find_key(None)
    path = tmp_path / ".ssh/id_rsa.pub"
    path.parent.mkdir()
    path.write_text(PUBLIC_KEY + "\n")
    assert find_key(None) == path
    path.write_text(text)
    with pytest.raises(UsageError, match="isn't a public key"):
        find_key(str(path))


def test_the_callers_address_is_looked_up(tmp_path: Path) -> None:
    answer = tmp_path / "answer"
    answer.write_text("192.0.2.7\n")
    assert callers_network(answer.as_uri()) == "192.0.2.7/32"
    for text in ("", "<html>login</html>", "0.0.0.0/0", "::1\n"):
        answer.write_text(text)
        with pytest.raises(InfrastructureError, match="--allow-ssh-from"):
            callers_network(answer.as_uri())
