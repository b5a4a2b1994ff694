"""Host keys of new nodes, read from their consoles: so that ssh meets no unknown host."""

import base64
import binascii
import socket
from collections.abc import Iterable, Mapping, Sequence

from paceline.errors import InfrastructureError
from paceline.launch.aws_client import Aws, AwsError
from paceline.provision.aws.nodes import Instance
from paceline.provision.aws.waiter import Waiter

_BEGIN, _END = "-----BEGIN SSH HOST KEY KEYS-----", "-----END SSH HOST KEY KEYS-----"
"""cloud-init prints the keys between these; cloudinit/config/cc_keys_to_console.py."""
_CONNECT_TIMEOUT_S = 3.0


def read_host_keys(console: str) -> tuple[str, ...]:
    """Find the public host keys in what a node printed on its console at its start.

    Returns:
        `kind base64` each; empty as long as the console doesn't show them.
    """
    _, begin, rest = console.rpartition(_BEGIN)
    block, end, _ = rest.partition(_END)
    if not begin or not end:
        return ()
    lines = [line.split() for line in block.splitlines()]
    return tuple(" ".join(words[:2]) for words in lines if _is_key(words))


def known_hosts_lines(keys: Mapping[str, Sequence[str]]) -> str:
    """Write a known_hosts file: address to keys."""
    return "".join(f"{address} {key}\n" for address, each in keys.items() for key in each)


def fetch_host_keys(
    aws: Aws, nodes: Iterable[Instance], waiter: Waiter, timeout_s: float
) -> dict[str, tuple[str, ...]]:
    """Read the nodes' host keys from their consoles; blocks until all are there or time is up.

    Returns:
        Keys by the node's address; nodes whose console doesn't show any are left out.
    """
    missing = list(nodes)
    found: dict[str, tuple[str, ...]] = {}

    def read() -> bool | None:
        """Look through the missing nodes' consoles once; None while one shows no keys."""
        for node in list(missing):
            keys = read_host_keys(_console(aws, node.id))
            if keys:
                found[node.address] = keys
                missing.remove(node)
        return None if missing else True

    waiter.until(read, timeout_s)
    return found


def wait_for_ssh(
    addresses: Iterable[str], waiter: Waiter, timeout_s: float, port: int = 22
) -> None:
    """Wait until ssh answers at every address; blocks.

    Raises:
        InfrastructureError: It doesn't within the time; the message names the addresses.
        KeyboardInterrupt: A signal asked to stop.
    """
    missing = list(addresses)

    def read() -> bool | None:
        """Try the missing addresses once; None while one doesn't answer."""
        for address in list(missing):
            waiter.check()
            if _answers(address, port):
                missing.remove(address)
        return None if missing else True

    if waiter.until(read, timeout_s) is None:
        raise InfrastructureError(
            f"no ssh server answers at {', '.join(missing)} after {timeout_s / 60:g} minutes. Is "
            "--allow-ssh-from the address that AWS sees? --no-wait doesn't wait for it"
        )


def _answers(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), timeout=_CONNECT_TIMEOUT_S) as connection:
            return connection.recv(4).startswith(b"SSH-")
    except OSError:
        return False


def _console(aws: Aws, instance: str) -> str:
    try:
        return aws.call("ec2", "get_console_output", InstanceId=instance, Latest=True).text(
            "Output"
        )
    except AwsError:  # older instance types show what they printed only some minutes later
        return aws.call("ec2", "get_console_output", InstanceId=instance).text("Output")


def _is_key(words: Sequence[str]) -> bool:
    if len(words) < 2 or not words[0].startswith(("ssh-", "ecdsa-")):
        return False
    try:
        return words[0].encode() in base64.b64decode(words[1], validate=True)[:64]
    except (binascii.Error, ValueError):
        return False
