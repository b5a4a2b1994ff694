"""What other commands read of the nodes: a hostfile, an ssh configuration. Pure text."""

from collections.abc import Sequence
from pathlib import Path

from paceline.launch.ssh.hostfile import Host, hostfile_line
from paceline.provision.aws.nodes import Instance

_IDENTITY = "  IdentityFile "


def hostfile_text(nodes: Sequence[Instance], *, slots: int, login: str, python: str) -> str:
    """Write the hostfile of some nodes, for `paceline train --hostfile`.

    Args:
        nodes: Those that run.
        slots: Workers on each.
        login: User to log in as.
        python: The Python on the nodes.
    """
    hosts = (
        Host(
            name=node.address,
            slots=slots,
            user=login,
            port=22,
            address=node.private_address or None,
            python=python,
        )
        for node in nodes
    )
    return "".join(f"{hostfile_line(host)}\n" for host in hosts)


def ssh_config_text(
    nodes: Sequence[Instance],
    *,
    login: str,
    known_hosts: Path,
    identity: str | None,
    complete: bool,
) -> str:
    """Write an ssh configuration for the nodes alone.

    Args:
        nodes: Those that run.
        login: User to log in as.
        known_hosts: File with their host keys.
        identity: The private key's file, as it stands in ssh's configuration; None: ssh's default.
        complete: Whether every node's host key is known: an unknown one is refused then.
    """
    aliases = " ".join(node.address for node in nodes)
    lines = [
        f"Host {aliases}",
        f"  User {login}",
        f"  UserKnownHostsFile {quoted(str(known_hosts))}",
        *([f"{_IDENTITY}{identity}", "  IdentitiesOnly yes"] if identity else []),
        *(["  StrictHostKeyChecking yes"] if complete else []),
    ]
    return "\n".join(lines) + "\n"


def quoted(path: str) -> str:
    """Write a path for ssh's configuration, where % begins a variable."""
    return '"' + path.replace("%", "%%") + '"'


def identity_in(config: str) -> str | None:
    """Find the private key's file in a configuration that `ssh_config_text` wrote."""
    for line in config.splitlines():
        if line.startswith(_IDENTITY):
            return line.removeprefix(_IDENTITY)
    return None
