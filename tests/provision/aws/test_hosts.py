"""Hostfile, ssh configuration and host keys, read back by those who read them."""

import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

from paceline.launch.ssh.hostfile import parse_hostfile
from paceline.provision.aws.files import (
    ClusterFiles,
    hostfile_text,
    identity_in,
    quoted,
    ssh_config_text,
)
from paceline.provision.aws.hostkeys import known_hosts_lines, read_host_keys
from paceline.provision.aws.nodes import Instance
from paceline.provision.aws.stack import Stack
from tests.launch.waiting import patient
from tests.support.needs import SSH, need


def node(index: int, public: str) -> Instance:
    return Instance(
        id=f"i-{index}",
        name=f"Node{index}",
        state="running",
        instance_type="g5.12xlarge",
        zone="us-east-1a",
        launched=datetime(2026, 11, 21, tzinfo=UTC),
        private_address=f"10.77.0.{index + 5}",
        public_address=public,
    )


NODES = [node(0, "192.0.2.1"), node(1, "")]


def test_the_hostfile_is_one() -> None:
    outputs = {"Slots": "4", "Login": "ubuntu", "Python": "/opt/pytorch/bin/python"}
    stack = Stack(id="s", name="c", status="", token="", cluster="c", outputs=outputs)
    text = hostfile_text(stack, NODES)
    first, second = parse_hostfile(text)
    assert (first.name, first.slots, first.user, first.port) == ("192.0.2.1", 4, "ubuntu", 22)
    assert (first.address, first.python) == ("10.77.0.5", "/opt/pytorch/bin/python")
    assert second.name == second.address == "10.77.0.6"


@pytest.mark.slow
def test_ssh_reads_the_configuration(tmp_path: Path) -> None:
    need(SSH)
    known, key = tmp_path / "50% known", tmp_path / "my key"
    text = ssh_config_text(
        NODES, login="ubuntu", known_hosts=known, identity=quoted(str(key)), complete=True
    )
    config = tmp_path / "config"
    config.write_text(text)
    done = subprocess.run(
        ["ssh", "-G", "-F", config, "192.0.2.1"],
        capture_output=True,
        text=True,
        timeout=patient(30),
    )
    read = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert {"user ubuntu", f"userknownhostsfile {known}", f"identityfile {key}"} <= set(read)
    assert any(line in read for line in ("stricthostkeychecking true", "stricthostkeychecking yes"))
    assert identity_in(text) == quoted(str(key))


def test_without_all_keys_ssh_goes_on_asking(tmp_path: Path) -> None:
    text = ssh_config_text(
        NODES, login="me", known_hosts=tmp_path / "k", identity=None, complete=False
    )
    assert "StrictHostKeyChecking" not in text
    assert identity_in(text) is None


CONSOLE = """[   12.3] cloud-init[987]: something
-----BEGIN SSH HOST KEY FINGERPRINTS-----
256 SHA256:abc root@ip-10-77-0-5 (ED25519)
-----END SSH HOST KEY FINGERPRINTS-----
-----BEGIN SSH HOST KEY KEYS-----
{keys}
-----END SSH HOST KEY KEYS-----
login: """


@pytest.mark.slow
def test_host_keys_are_read_from_a_console(tmp_path: Path) -> None:
    need(SSH)
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "root@ip", "-f", tmp_path / "key"],
        check=True,
        timeout=patient(30),
    )
    public = (tmp_path / "key.pub").read_text().strip()
    found = read_host_keys(
        CONSOLE.format(keys=f"{public}\nssh-rsa nonsense me").replace("\n", "\r\n")
    )
    assert found == (" ".join(public.split()[:2]),)
    known = tmp_path / "known_hosts"
    known.write_text(known_hosts_lines({"192.0.2.1": found}))
    looked = subprocess.run(
        ["ssh-keygen", "-F", "192.0.2.1", "-f", known],
        capture_output=True,
        text=True,
        timeout=patient(30),
    )
    assert found[0] in looked.stdout


@pytest.mark.parametrize(
    "console", ["", "-----BEGIN SSH HOST KEY KEYS-----\nssh-ed25519 AAAA", "-----END SSH"]
)
def test_a_console_that_does_not_show_them_yet(console: str) -> None:
    assert read_host_keys(console) == ()


def test_files_are_forgotten_with_the_nodes(tmp_path: Path) -> None:
    files = ClusterFiles(directory=tmp_path / "a")
    files.directory.mkdir()
    files.known_hosts.write_text("192.0.2.1 ssh-ed25519 AAAA\n192.0.2.1 ssh-rsa BBBB\n")
    assert files.known() == {"192.0.2.1": ("ssh-ed25519 AAAA", "ssh-rsa BBBB")}
    files.forget()
    assert not files.directory.exists()
    assert files.known() == {}
    files.forget()
