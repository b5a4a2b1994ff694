"""Removes from hosts what measurements leave there and nobody needs: their snapshots."""

import shlex
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from paceline.errors import InfrastructureError
from paceline.launch.ssh.hostfile import Host
from paceline.launch.ssh.options import HostsOptions
from paceline.launch.ssh.parallel_commands import Commands, on_each
from paceline.launch.ssh.ssh import plain_ssh_words

_MOST_S = 30.0


def sweep(hosts: Sequence[Host], options: HostsOptions, run_dir: Path, here: Path) -> None:
    """Remove a measurement's snapshots from the hosts. Blocks; a host that fails keeps them.

    Args:
        hosts: Those that trained.
        options: How ssh reaches them.
        run_dir: The measurement's, on this machine.
        here: Working directory of the command.
    """

    def work(host: Host, commands: Commands) -> None:
        command = sweep_command(host, options, run_dir, here)
        with suppress(OSError, subprocess.TimeoutExpired):
            commands.run(command, _MOST_S)

    with suppress(InfrastructureError):
        on_each(hosts, work)


def sweep_command(host: Host, options: HostsOptions, run_dir: Path, here: Path) -> list[str]:
    """Write the ssh command for one host; arguments as for `sweep`. Pure."""
    place = run_dir / "snapshots"
    if place.is_relative_to(here):
        usual = f"~/paceline/{here.name}" if options.sync_code else str(here)
        place = Path(host.directory or usual) / place.relative_to(here)
    text = str(place)
    path = f'"$HOME"{shlex.quote(text[1:])}' if text.startswith("~/") else shlex.quote(text)
    return [*plain_ssh_words(host, options), "--", host.name, f"rm -rf -- {path}"]
