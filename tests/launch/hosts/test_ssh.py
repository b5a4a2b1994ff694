import shlex
from pathlib import Path

import pytest

from paceline.launch.hosts.hostfile import Host
from paceline.launch.hosts.options import HostsOptions
from paceline.launch.hosts.ssh import explain, forwarded_port, guard_command

_HOST = Host(name="node1", user="alice", port=2222, python="/opt/my env/bin/python; id")


def test_the_host_stands_behind_the_options_and_only_python_is_run() -> None:
    command = guard_command(_HOST, HostsOptions(hosts="node1"), 4000)
    place = command.index("--")
    assert command[place + 1] == "node1"
    assert shlex.split(command[place + 2]) == [
        "exec",
        "/opt/my env/bin/python; id",
        "-P",
        "-m",
        "paceline.launch.hosts.guard",
    ]
    assert command[command.index("-R") + 1] == "127.0.0.1:0:127.0.0.1:4000"
    assert command[command.index("-l") + 1] == "alice"
    assert command[command.index("-p") + 1] == "2222"


@pytest.mark.parametrize(("keys", "said"), [("known", "yes"), ("accept-new", "accept-new")])
def test_unknown_host_keys_are_refused_unless_said_otherwise(keys: str, said: str) -> None:
    options = HostsOptions(hosts="node1", host_keys=keys)  # type: ignore[arg-type]
    settings = guard_command(_HOST, options)
    assert f"StrictHostKeyChecking={said}" in settings
    assert "BatchMode=yes" in settings
    assert "ForwardAgent=no" in settings


def test_a_configuration_of_ones_own(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.touch()
    command = guard_command(_HOST, HostsOptions(hosts="a", ssh_config=str(config)))
    assert command[command.index("-F") + 1] == str(config)


def test_the_forwarded_port_is_read() -> None:
    line = "Allocated port 36719 for remote forward to 127.0.0.1:4000"
    assert forwarded_port(line) == 36719
    assert forwarded_port("Warning: Permanently added 'a'") is None


@pytest.mark.parametrize(
    ("said", "part"),
    [
        ("Host key verification failed.", "--host-keys accept-new"),
        ("WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!\nHost key verification", "ssh-keygen"),
        ("alice@node1: Permission denied (publickey).", "ssh-copy-id"),
        ("/p/python: No module named paceline", "--install"),
        ("sh: 1: exec: /p/python: not found", "python= in the hostfile"),
        ("Warning: remote port forwarding failed", "AllowTcpForwarding"),
        ("something else", "code 255: something else"),
        ("", "it said nothing"),
    ],
)
def test_a_failed_connection_is_explained(said: str, part: str) -> None:
    text = explain(_HOST, 255, said)
    assert text.startswith("node1: ")
    assert part in text
