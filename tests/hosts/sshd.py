"""ssh between the machines of a rig: a server with its own key on each host, one client's key."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.hosts.machine import Machine

_LISTENING = "0A"  # TCP_LISTEN, as /proc/net/tcp writes it
_SERVER = """\
Port 22
ListenAddress {address}
HostKey {directory}/hostkey
PidFile none
AuthorizedKeysFile {directory}/authorized_keys
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
UsePAM no
PrintMotd no
MaxStartups 100:30:200
MaxSessions 100
Subsystem sftp internal-sftp
"""
_CLIENT = """\
Host *
  User root
  IdentityFile {directory}/id
  IdentitiesOnly yes
  IdentityAgent none
  UserKnownHostsFile {directory}/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  BatchMode yes
  ConnectTimeout 5
  LogLevel ERROR
"""


def set_up(directory: Path, machines: Sequence[Machine]) -> Path:
    """Make keys and configurations for servers on all the machines.

    Args:
        directory: Where the client's files go; a server's go into its machine's directory.
        machines: The hosts that have a server.

    Returns:
        The client's configuration, for `ssh -F`. All host keys are known to it.
    """
    key = _make_key(directory / "id")
    known = []
    for machine in machines:
        host_key = _make_key(machine.directory / "hostkey")
        known.append(f"{machine.name},{machine.address} {host_key}\n")
        (machine.directory / "authorized_keys").write_text(key)
        (machine.directory / "sshd_config").write_text(_server(machine))
    (directory / "known_hosts").write_text("".join(known))
    config = directory / "ssh_config"
    config.write_text(_CLIENT.format(directory=directory))
    return config


def start(machine: Machine) -> None:
    """Start the server; it answers once `listens` is true."""
    config = machine.directory / "sshd_config"
    machine.start_daemon("/usr/sbin/sshd", "-D", "-e", "-f", str(config))


def listens(machine: Machine) -> bool:
    """Whether the server of a machine can be reached."""
    # Of a process outside, /proc shows the network of that process.
    rows = Path(f"/proc/{machine.init}/net/tcp").read_text().splitlines()[1:]
    return any(row.split()[1].endswith(":0016") and row.split()[3] == _LISTENING for row in rows)


def _server(machine: Machine) -> str:
    text = _SERVER.format(address=machine.address, directory=machine.directory)
    return text + _set_environment(machine.environment)


def _set_environment(environment: Mapping[str, str]) -> str:
    # One line for all: of several, sshd heeds the first alone.
    pairs = " ".join(f'"{name}={value}"' for name, value in environment.items())
    return f"SetEnv {pairs}\n" if pairs else ""


def _make_key(path: Path) -> str:
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path)]
    subprocess.run(command, check=True, capture_output=True)
    return path.with_name(f"{path.name}.pub").read_text().strip()
