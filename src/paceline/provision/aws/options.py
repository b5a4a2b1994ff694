"""Options of `paceline aws`: which nodes, where, for how long, and who may reach them."""

import ipaddress
import math
import re
from dataclasses import dataclass

from paceline.errors import UsageError

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,39}")
_USER = re.compile(r"[a-z_][a-z0-9_-]{0,31}")


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Which nodes are meant."""

    name: str = "paceline"
    """Name of the nodes together: of their CloudFormation stack, and in every tag."""

    region: str | None = None
    """AWS region. Default: that of your AWS configuration (AWS_REGION, or the profile's)."""

    def __post_init__(self) -> None:
        """Check the name, which also names a directory.

        Raises:
            UsageError: CloudFormation wouldn't accept it.
        """
        if not _NAME.fullmatch(self.name):
            raise UsageError(
                f"--name {self.name!r} can't be a stack's name: write up to 40 letters, digits and "
                "hyphens, a letter first"
            )


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """What the nodes are."""

    nodes: int = 2
    """How many nodes to create."""

    instance_type: str = "g5.12xlarge"
    """EC2 instance type of each node."""

    spot: bool = False
    """Use spot capacity: cheaper, and taken away again when AWS needs it."""

    max_hours: float = 12.0
    """Lifetime: so many hours after its start each node shuts itself down and is gone, with its
    disk, whatever runs on it."""

    disk_gb: int = 200
    """Size of each node's disk, in GB. It is encrypted, and goes with the node."""

    image: str | None = None
    """Machine image: an AMI's id, or the name of an SSM parameter that holds one. Default: AWS's
    deep-learning image with PyTorch on Ubuntu, for the type's architecture."""

    root_device: str = "/dev/sda1"
    """Name of the root disk's device; it depends on the image."""

    login: str = "ubuntu"
    """User to log in as; it depends on the image."""

    node_python: str = "/opt/pytorch/bin/python"
    """Python on the nodes that has PyTorch; it depends on the image."""

    bucket: str | None = None
    """S3 bucket, with or without a prefix (data/stl10), that the nodes may read and write. Default:
    they have no rights in your account at all."""

    def __post_init__(self) -> None:
        """Check what is used on this machine, or that CloudFormation doesn't check.

        Raises:
            UsageError: A value is out of range or can't be read.
        """
        for flag, value, least, most in (
            ("--nodes", self.nodes, 1, 64),
            ("--max-hours", self.max_hours, 0.25, 24 * 30),
            ("--disk-gb", self.disk_gb, 8, 16384),
        ):
            if not math.isfinite(value) or not least <= value <= most:
                raise UsageError(f"{flag} is {value}; it must be from {least:g} to {most:g}")
        if not _USER.fullmatch(self.login):
            raise UsageError(f"--login {self.login!r} is not a user name")
        if not self.node_python.startswith("/") or not self.node_python.isprintable():
            raise UsageError(f"--node-python {self.node_python!r} must be an absolute path")


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """How the nodes are reached, and how they reach each other."""

    public_key: str | None = None
    """File with the public key to log in with; it becomes a key pair of the stack. Default:
    ~/.ssh/id_ed25519.pub or ~/.ssh/id_rsa.pub."""

    allow_ssh_from: str | None = None
    """Addresses that may log in, such as 192.0.2.7 or 192.0.2.0/24. Default: yours alone, as
    checkip.amazonaws.com sees it."""

    zone: str | None = None
    """Availability zone, all nodes in one. Default: the first that offers the instance type."""

    subnet: str | None = None
    """Your own subnet to put the nodes into. Default: a network of their own."""

    efa: bool | None = None
    """Give each node Elastic Fabric Adapters. Default: if there are several and their type has
    them."""

    def __post_init__(self) -> None:
        """Check who may log in, and where the nodes are.

        Raises:
            UsageError: A value can't be read, or allows too much.
        """
        if self.allow_ssh_from is not None:
            read_network(self.allow_ssh_from)
        if self.subnet is not None and self.zone is not None:
            raise UsageError("--subnet is in a zone already: leave out --zone")


@dataclass(frozen=True, kw_only=True)
class ConfirmOptions:
    """Whether nodes are created."""

    yes: bool = False
    """Don't ask before nodes are created that cost money."""

    dry_run: bool = False
    """Print the template and its parameters, and create nothing."""


def read_network(text: str) -> str:
    """Return an IPv4 address or network in CIDR notation.

    Raises:
        UsageError: It is neither, or wider than /8.
    """
    try:
        network = ipaddress.IPv4Network(text, strict=False)
    except ValueError:
        raise UsageError(
            f"--allow-ssh-from {text!r} is no IPv4 address or network. Write 192.0.2.7 or "
            "192.0.2.0/24"
        ) from None
    if network.prefixlen < 8:
        raise UsageError(
            f"--allow-ssh-from {text} would let the world in: give your own address or network"
        )
    return str(network)
