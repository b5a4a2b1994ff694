"""Chooses the rendezvous address: from the options, else from the launcher's variables.

A Slurm node's address is asked of Slurm where its name can't be resolved.
"""

import re
import socket
import subprocess
from dataclasses import replace

from paceline.distributed.address import Address, address_of
from paceline.distributed.environment import store_file, uses_agent_store
from paceline.distributed.launcher_variables import Environment
from paceline.distributed.options import DistOptions
from paceline.distributed.placement import Placement

_LIMIT_S = 20.0
_FIELD = re.compile(r"(?:^|\s)NodeAddr=(\S+)")


def meeting_address(
    placement: Placement, options: DistOptions, environment: Environment
) -> Address:
    """Say where a worker meets the others.

    Raises:
        UsageError: Nobody says where rank 0 is.
    """
    kept = uses_agent_store(environment)
    address = address_of(options.init_method, placement, kept, store_file(environment))
    return known_address(address) if placement.source == "slurm" else address


def known_address(address: Address) -> Address:
    """Give an address whose host can be resolved here, by asking Slurm where that needs to be.

    Clusters may name their nodes in Slurm's configuration alone, each with its address.

    Args:
        address: Where the workers of a Slurm step meet.

    Returns:
        The same one where its host can be resolved, or Slurm knows no better.
    """
    if address.scheme == "file" or _resolves(address.host):
        return address
    try:
        # Names of Slurm nodes need not be host names.
        answer = subprocess.run(
            ["scontrol", "show", "node", "--oneliner", address.host],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return address
    host = node_address(answer.stdout)
    return address if host is None else replace(address, host=host)


def node_address(text: str) -> str | None:
    """Read a node's address from what `scontrol show node` prints; None where there is none."""
    match = _FIELD.search(text)
    return match[1] if match else None


def _resolves(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True
