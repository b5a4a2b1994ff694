"""Options of training over hosts that ssh reaches."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.errors import UsageError
from paceline.files import read_plain, why_unreadable
from paceline.launch.ssh.hostfile import Host, parse_hostfile, parse_hosts

_HOSTFILE_MAX_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class HostsOptions:
    """Hosts to train on, and how ssh reaches them."""

    hosts: str | None = None
    """Hosts to train on by ssh, each with its number of workers: node0:4,alice@node1:2."""

    hostfile: str | None = None
    """File with a host a line: a name as for --hosts, then slots=, user=, port=, address=, python=
    and dir= if need be. Read again before each restart, so that hosts can be added."""

    min_hosts: int = 1
    """Hosts that must be left for a training to go on after others were lost."""

    host_keys: Literal["known", "accept-new"] = "known"
    """Host keys that are accepted: those that ssh knows already, or also the first of a new host. A
    key that has changed is always refused."""

    ssh_config: str | None = None
    """Configuration file for ssh instead of your own."""

    sync_code: bool = False
    """Copy the working directory to each host first (by rsync; without what git ignores)."""

    install: bool = False
    """Install this Paceline on each host that has no such one, into an environment of its own."""

    def __post_init__(self) -> None:
        """Check what can be checked without the hosts.

        Raises:
            UsageError: Both ways to name hosts were used, or a value is out of range.
        """
        if self.hosts is not None and self.hostfile is not None:
            raise UsageError("give --hosts or --hostfile, not both")
        if self.min_hosts < 1:
            raise UsageError(f"--min-hosts is {self.min_hosts}; it must be at least 1")
        if self.ssh_config is not None and not os.path.isfile(os.path.expanduser(self.ssh_config)):  # noqa: PTH111, PTH113  # a Path raises at a name that is too long
            raise UsageError(f"--ssh-config: there is no file {self.ssh_config}")

    @property
    def named(self) -> bool:
        """Whether hosts are named at all."""
        return self.hosts is not None or self.hostfile is not None

    def read(self) -> tuple[Host, ...]:
        """Read the hosts; the file anew at each call.

        Raises:
            UsageError: They can't be read.
        """
        if self.hosts is not None:
            return parse_hosts(self.hosts)
        if self.hostfile is None:
            return ()
        path = Path(self.hostfile).expanduser()
        try:
            text = read_plain(path, _HOSTFILE_MAX_BYTES).decode()
        except (OSError, ValueError) as error:
            raise UsageError(
                f"the hostfile {path} can't be read: {why_unreadable(error)}"
            ) from error
        return parse_hostfile(text, str(path))
