"""How ssh reaches the nodes: public key, allowed network, host keys, and files for other commands.

The files are in `~/.paceline/aws/NAME`: `hosts`, `ssh_config` and `known_hosts`.
"""

import ipaddress
import re
import shutil
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.errors import InfrastructureError, UsageError
from paceline.files import write_atomic
from paceline.launch.ssh.hostfile import Host, hostfile_line
from paceline.options.text import clause
from paceline.provision.aws.stack import Aws, Node, Stack, aws_errors

ADDRESS_SERVICE = "https://checkip.amazonaws.com"
_KINDS = ("ssh-ed25519", "ssh-rsa")
"""What EC2 imports; Amazon EC2 key pairs, EC2 User Guide."""
_KEY_BLOCK = re.compile(
    r"-----BEGIN SSH HOST KEY KEYS-----\s(.*?)-----END SSH HOST KEY KEYS-----", re.DOTALL
)
"""What cloud-init prints; cloudinit/config/cc_keys_to_console.py."""
_KEY = re.compile(r"^(?:ssh-|ecdsa-)[\w-]+ AAAA[\w+/=]+", re.ASCII | re.MULTILINE)
_KEYS_TIMEOUT_S = 10 * 60.0
_POLL_S = 5.0


def callers_network(service: str = ADDRESS_SERVICE) -> str:
    """Return the address that this machine has on the internet, in CIDR notation.

    Raises:
        InfrastructureError: The service can't be reached, or answers something else.
    """
    try:
        with urllib.request.urlopen(service, timeout=10.0) as answer:
            text = answer.read(100).decode("ascii").strip()
        return f"{ipaddress.IPv4Address(text)}/32"
    except (OSError, ValueError) as error:
        raise InfrastructureError(
            f"your own address couldn't be found through {service} ({clause(error)}): say who may "
            "log in with --allow-ssh-from"
        ) from error


def find_key(given: str | None) -> Path:
    """Return the file of the public key to log in with; None: the user's own.

    Raises:
        UsageError: There is none, or EC2 wouldn't import it.
    """
    usual = [Path.home() / ".ssh" / name for name in ("id_ed25519.pub", "id_rsa.pub")]
    candidates = [Path(given).expanduser()] if given is not None else usual
    path = next((path for path in candidates if path.is_file()), None)
    if path is None:
        raise UsageError(
            f"no public key was found ({', '.join(map(str, candidates))}): make one with "
            "ssh-keygen -t ed25519, or give --public-key"
        )
    text = path.read_text("utf-8", "replace").strip()
    if text.partition(" ")[0] not in _KINDS or "\n" in text:
        raise UsageError(f"{path} isn't a public key that EC2 imports ({' or '.join(_KINDS)})")
    return path


def read_host_keys(console: str) -> list[str]:
    """Return the public host keys that a node printed on its console; empty if none yet."""
    blocks = _KEY_BLOCK.findall(console.replace("\r\n", "\n"))
    return _KEY.findall(blocks[-1]) if blocks else []


def fetch_host_keys(
    aws: Aws, nodes: Sequence[Node], timeout_s: float = _KEYS_TIMEOUT_S
) -> dict[str, list[str]]:
    """Read the nodes' host keys from their consoles, so that ssh meets no unknown host; blocks.

    Returns:
        Keys by the node's address, without nodes whose console shows none within the time.
    """
    from botocore.exceptions import ClientError

    found: dict[str, list[str]] = {}
    end_s = time.monotonic() + timeout_s
    while True:
        for node in nodes:
            if node.address not in found:
                with aws_errors():
                    read = aws.ec2.get_console_output
                    try:
                        answer = read(InstanceId=node.id, Latest=True)
                    except ClientError:  # older types only have it some minutes later
                        answer = read(InstanceId=node.id)
                if keys := read_host_keys(answer.get("Output", "")):
                    found[node.address] = keys
        if len(found) == len(nodes) or time.monotonic() >= end_s:
            return found
        time.sleep(_POLL_S)


def directory_of(name: str) -> Path:
    """Return the directory of a cluster's files."""
    return Path.home() / ".paceline" / "aws" / name


def hostfile_text(stack: Stack, nodes: Sequence[Node]) -> str:
    """Return the hostfile of a stack's running nodes, for `paceline train --hostfile`."""
    hosts = (
        Host(
            name=node.address,
            slots=int(stack.outputs["Slots"]),
            user=stack.outputs["Login"],
            port=22,
            address=node.private_address or None,
            python=stack.outputs["Python"],
        )
        for node in nodes
    )
    return "".join(f"{hostfile_line(host)}\n" for host in hosts)


def ssh_config_text(
    directory: Path,
    login: str,
    keys: Mapping[str, Sequence[str]],
    nodes: Sequence[Node],
    private_key: Path | None,
) -> str:
    """Return an ssh configuration for the nodes, strict if `keys` has the host keys of all."""
    lines = [
        f"Host {' '.join(node.address for node in nodes)}",
        f"  User {login}",
        f"  UserKnownHostsFile {_quoted(directory / 'known_hosts')}",
    ]
    if private_key is not None:
        lines += [f"  IdentityFile {_quoted(private_key)}", "  IdentitiesOnly yes"]
    if all(node.address in keys for node in nodes):
        lines += ["  StrictHostKeyChecking yes"]
    return "\n".join(lines) + "\n"


def _quoted(path: Path) -> str:
    return '"' + str(path).replace("%", "%%") + '"'  # % begins a variable there


def write_files(
    stack: Stack, name: str, nodes: Sequence[Node], keys: Mapping[str, Sequence[str]], key: Path
) -> None:
    """Write the files of a cluster.

    Args:
        keys: Host keys by address.
        key: File of the public key; the private one is expected beside it.

    Raises:
        OSError: The disk is full, or the directory can't be written.
    """
    directory = directory_of(name)
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    private = key.with_suffix("")
    beside = key.suffix == ".pub" and private.is_file()
    known = "".join(f"{address} {key}\n" for address, each in keys.items() for key in each)
    config = ssh_config_text(
        directory, stack.outputs["Login"], keys, nodes, private if beside else None
    )
    write_atomic(directory / "known_hosts", known.encode())
    write_atomic(directory / "ssh_config", config.encode())
    write_atomic(directory / "hosts", hostfile_text(stack, nodes).encode())


def forget_files(name: str) -> None:
    """Remove the files of a cluster that is gone."""
    shutil.rmtree(directory_of(name), ignore_errors=True)
