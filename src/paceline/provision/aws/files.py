"""A cluster's files on this machine, in `~/.paceline/aws/NAME`: hostfile, ssh settings, keys."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.files import write_atomic
from paceline.launch.ssh.hostfile import Host, hostfile_line
from paceline.provision.aws.hostkeys import known_hosts_lines
from paceline.provision.aws.nodes import Instance
from paceline.provision.aws.stack import Stack

_IDENTITY = "  IdentityFile "


def hostfile_text(stack: Stack, nodes: Sequence[Instance]) -> str:
    """Write the hostfile of a stack's running nodes, for `paceline train --hostfile`."""
    outputs = stack.outputs
    hosts = (
        Host(
            name=node.address,
            slots=int(outputs.get("Slots", "1")),
            user=_login(stack),
            port=22,
            address=node.private_address or None,
            python=outputs.get("Python", "/usr/bin/python3"),
        )
        for node in nodes
    )
    return "".join(f"{hostfile_line(host)}\n" for host in hosts)


def _login(stack: Stack) -> str:
    return stack.outputs.get("Login", "ubuntu")


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


@dataclass(frozen=True, kw_only=True)
class ClusterFiles:
    """The files of one cluster."""

    directory: Path

    @property
    def hostfile(self) -> Path:
        """For `paceline train --hostfile`."""
        return self.directory / "hosts"

    @property
    def ssh_config(self) -> Path:
        """For `ssh -F` and `--ssh-config`."""
        return self.directory / "ssh_config"

    @property
    def known_hosts(self) -> Path:
        """Host keys, as the nodes' consoles showed them."""
        return self.directory / "known_hosts"

    def identity(self) -> str | None:
        """Give the private key's file that was written at the start."""
        try:
            return identity_in(self.ssh_config.read_text())
        except OSError:
            return None

    def known(self) -> dict[str, tuple[str, ...]]:
        """Read the host keys that are kept, by address."""
        try:
            lines = [line.split(" ", 1) for line in self.known_hosts.read_text().splitlines()]
        except OSError:
            return {}
        keys: dict[str, tuple[str, ...]] = {}
        for address, key in lines:
            keys[address] = (*keys.get(address, ()), key)
        return keys

    def forget(self) -> None:
        """Remove the files; the nodes are gone."""
        for path in (self.hostfile, self.ssh_config, self.known_hosts):
            path.unlink(missing_ok=True)
        if self.directory.is_dir() and not any(self.directory.iterdir()):
            self.directory.rmdir()


def kept(name: str) -> ClusterFiles:
    """Say where a cluster's files are."""
    return ClusterFiles(directory=Path.home() / ".paceline" / "aws" / name)


def keep(
    files: ClusterFiles,
    stack: Stack,
    nodes: Sequence[Instance],
    keys: Mapping[str, Sequence[str]],
    private_key: Path | None,
) -> None:
    """Write the files.

    Args:
        keys: Their host keys, by address.
        private_key: The key to log in with, if it isn't ssh's default or written already.

    Raises:
        OSError: The disk is full, or the directory can't be written.
    """
    identity = quoted(str(private_key)) if private_key else files.identity()
    files.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    config = ssh_config_text(
        nodes,
        login=_login(stack),
        known_hosts=files.known_hosts,
        identity=identity,
        complete=all(node.address in keys for node in nodes),
    )
    write_atomic(files.known_hosts, known_hosts_lines(keys).encode())
    write_atomic(files.ssh_config, config.encode())
    write_atomic(files.hostfile, hostfile_text(stack, nodes).encode())
