import shlex
from pathlib import Path

import pytest

from paceline.launch.ssh.hostfile import Host
from paceline.launch.ssh.options import HostsOptions
from paceline.launch.ssh.ssh import (
    agent_command,
    explain,
    forwarded_port,
    forwarding_failed,
    plain_ssh_command,
)

_HOST = Host(name="node1", user="alice", port=2222, python="/opt/my env/bin/python; id")


def test_the_host_stands_behind_the_options_and_only_python_is_run() -> None:
    command = agent_command(_HOST, HostsOptions(hosts="node1"), 4000)
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
    settings = agent_command(_HOST, options)
    assert f"StrictHostKeyChecking={said}" in settings
    assert "BatchMode=yes" in settings
    assert "ForwardAgent=no" in settings


def test_a_configuration_of_ones_own(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.touch()
    command = agent_command(_HOST, HostsOptions(hosts="a", ssh_config=str(config)))
    assert command[command.index("-F") + 1] == str(config)


def test_the_forwarded_port_is_read() -> None:
    line = "Allocated port 36719 for remote forward to 127.0.0.1:4000"
    assert forwarded_port(line) == 36719
    assert forwarded_port("Warning: Permanently added 'a'") is None


def test_the_users_own_forwards_do_no_harm() -> None:
    options = HostsOptions(hosts="node1")
    training = agent_command(_HOST, options, 4000)
    assert "ExitOnForwardFailure=no" in training
    assert "ClearAllForwardings=yes" not in training  # it would clear ours too
    for command in (agent_command(_HOST, options), plain_ssh_command(_HOST, options)):
        assert "ClearAllForwardings=yes" in command


def test_a_refused_forward_is_seen_unless_it_is_the_users_own() -> None:
    warning = "Warning: remote port forwarding failed for listen port"
    assert forwarding_failed(f"{warning} 0")
    assert not forwarding_failed(f"{warning} 8080")
    assert "AllowTcpForwarding" in explain(_HOST, None, f"{warning} 0\nmore")


@pytest.mark.parametrize(
    ("code", "said", "part"),
    [
        (255, "Host key verification failed.", "--host-keys accept-new"),
        (255, "REMOTE HOST IDENTIFICATION HAS CHANGED!\nHost key verification", "ssh-keygen"),
        (255, "alice@node1: Permission denied (publickey).", "ssh-copy-id"),
        (255, "channel 3: /x: No such file or directory", "code 255: channel 3"),
        (1, "(ModuleNotFoundError: No module named 'paceline')", "--install"),
        (1, "ModuleNotFoundError: No module named 'numpy'", "code 1: ModuleNotFoundError"),
        (1, "PermissionError: [Errno 13] Permission denied (x)", "code 1: PermissionError"),
        (1, "FileNotFoundError: No such file or directory", "code 1: FileNotFoundError"),
        (127, "sh: 1: exec: /p/python: not found", "python= in the hostfile"),
        (None, "", "the connection ended: it said nothing"),
        (255, "something else", "code 255: something else"),
        (255, "", "it said nothing"),
    ],
)
def test_a_failed_connection_is_explained(code: int | None, said: str, part: str) -> None:
    text = explain(_HOST, code, said)
    assert text.startswith("node1: ")
    assert part in text
