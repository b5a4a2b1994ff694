"""Options of `paceline aws`: which nodes, where, for how long, and who may reach them."""

import ipaddress
import math
import re
from dataclasses import dataclass

from paceline.errors import UsageError

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,39}")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"[A-Za-z0-9!_.'()/=-]*")
_USER = re.compile(r"[a-z_][a-z0-9_-]{0,31}")
_KEY_NAME = re.compile(r"[\w .+@:=,/-]{1,255}")
_MAX_NODES = 64
_MIN_PORTS = 1000


@dataclass(frozen=True, kw_only=True)
class ClusterPlace:
    """Which nodes are meant."""

    name: str = "paceline"
    """Name of the nodes together: of their CloudFormation stack, and in every tag."""

    region: str | None = None
    """AWS region. Default: that of your AWS configuration (AWS_REGION, or the profile's)."""

    def __post_init__(self) -> None:
        """Check the name.

        Raises:
            UsageError: CloudFormation wouldn't take it.
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
    """How many nodes to make."""

    instance_type: str = "g5.12xlarge"
    """EC2 instance type of each node."""

    spot: bool = False
    """Take spot capacity: cheaper, and taken away again when AWS needs it."""

    max_hours: float = 12.0
    """Life time: so many hours after its start each node shuts itself down and is gone, with its
    disk, whatever runs on it."""

    disk_gb: int = 200
    """Size of each node's disk, in GB. It is encrypted, and goes with the node."""

    image: str | None = None
    """Machine image: an AMI's id, or the name of an SSM parameter that holds one. Default: AWS's
    deep-learning image with PyTorch on Ubuntu, for the type's architecture."""

    login: str = "ubuntu"
    """User to log in as; it depends on the image."""

    node_python: str = "/opt/pytorch/bin/python"
    """Python on the nodes that has PyTorch; it depends on the image."""

    bucket: str | None = None
    """S3 bucket, with or without a prefix (data/stl10), that the nodes may read and write. Default:
    they have no rights in your account at all."""

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            UsageError: A value is out of range or can't be read.
        """
        _check_range("--nodes", self.nodes, 1, _MAX_NODES)
        _check_range("--max-hours", self.max_hours, 0.25, 24 * 30)
        _check_range("--disk-gb", self.disk_gb, 8, 16384)
        if not _USER.fullmatch(self.login):
            raise UsageError(f"--login {self.login!r} is no user's name")
        if not self.node_python.startswith("/") or not self.node_python.isprintable():
            raise UsageError(f"--node-python {self.node_python!r} must be a whole path: /...")
        if self.bucket is not None:
            split_bucket(self.bucket)


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """How the nodes are reached, and how they reach each other."""

    ssh_key: str | None = None
    """Name of an EC2 key pair that is there already, to log in with."""

    public_key: str | None = None
    """File with the public key to log in with; it becomes a key pair of the stack. Default:
    ~/.ssh/id_ed25519.pub or ~/.ssh/id_rsa.pub."""

    allow_ssh_from: str | None = None
    """Addresses that may log in, such as 192.0.2.7 or 192.0.2.0/24. Default: yours alone, as
    checkip.amazonaws.com sees it."""

    port_range: str = "20000-29999"
    """TCP ports on which the nodes reach each other, and from which their systems take every port
    for Gloo and NCCL."""

    zone: str | None = None
    """Availability zone, all nodes in one. Default: the first that offers the instance type."""

    subnet: str | None = None
    """Your own subnet to put the nodes into. Default: a network of their own."""

    efa: bool | None = None
    """Give each node Elastic Fabric Adapters. Default: if there are several and their type has
    them."""

    def __post_init__(self) -> None:
        """Check what can be checked without AWS.

        Raises:
            UsageError: A value can't be read, or lets too many in.
        """
        split_ports(self.port_range)
        if self.allow_ssh_from is not None:
            read_network(self.allow_ssh_from)
        if self.ssh_key is not None and self.public_key is not None:
            raise UsageError("--ssh-key names a key pair at AWS, --public-key a file: give one")
        if self.ssh_key is not None and not _KEY_NAME.fullmatch(self.ssh_key):
            raise UsageError(f"--ssh-key {self.ssh_key!r} can't be a key pair's name")
        if self.subnet is not None and self.zone is not None:
            raise UsageError("--subnet lies in a zone already: leave out --zone")


@dataclass(frozen=True, kw_only=True)
class AskOptions:
    """What is asked, and what is waited for."""

    yes: bool = False
    """Don't ask before nodes are made that cost money."""

    dry_run: bool = False
    """Print the template and its parameters, and make nothing."""

    wait: bool = True
    """Wait until each node answers on its ssh port, and fetch its host key."""


def split_bucket(text: str) -> tuple[str, str]:
    """Split `bucket/a/prefix` (`s3://` may stand before it).

    Returns:
        Bucket and prefix; the prefix may be empty.

    Raises:
        UsageError: It can't be a bucket's name, or the prefix has signs with a meaning of their
            own to AWS.
    """
    bucket, _, prefix = text.removeprefix("s3://").partition("/")
    if not _BUCKET.fullmatch(bucket) or not _PREFIX.fullmatch(prefix):
        raise UsageError(f"--bucket {text!r}: write bucket or bucket/prefix, without * ? or $")
    return bucket, prefix.strip("/")


def split_ports(text: str) -> tuple[int, int]:
    """Read a range of ports, `20000-29999`.

    Raises:
        UsageError: It is no range, or too small for the connections of a training.
    """
    first, _, last = text.partition("-")
    if not (first.isascii() and first.isdecimal() and last.isascii() and last.isdecimal()):
        raise UsageError(f"--port-range {text!r} is no range of ports. Write 20000-29999")
    low, high = int(first), int(last)
    if not 1024 <= low <= high <= 65535 or high - low + 1 < _MIN_PORTS:
        raise UsageError(
            f"--port-range {text}: it must lie within 1024-65535 and hold at least {_MIN_PORTS} "
            "ports, since every connection between workers takes some"
        )
    return low, high


def read_network(text: str) -> str:
    """Read an IPv4 address or network; one that is open to the world is refused.

    Returns:
        The network in CIDR notation.

    Raises:
        UsageError: It is none, or wider than /8.
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


def _check_range(flag: str, value: float, least: float, most: float) -> None:
    if not math.isfinite(value) or not least <= value <= most:
        raise UsageError(f"{flag} is {value}; it must be from {least:g} to {most:g}")
