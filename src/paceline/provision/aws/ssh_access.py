"""Who may log in to the nodes: the caller's address and public key."""

import ipaddress
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import InfrastructureError, UsageError
from paceline.launch.aws_client import Aws
from paceline.options.text import clause

ADDRESS_SERVICE = "https://checkip.amazonaws.com"
_KEY_FILES = ("id_ed25519.pub", "id_rsa.pub")
_KINDS = ("ssh-ed25519", "ssh-rsa")
"""What EC2 imports; Amazon EC2 key pairs, EC2 User Guide."""
_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class LoginKey:
    """The key to log in with: a key pair that AWS has already, or a public key to import."""

    key_name: str = ""
    public_key: str = ""
    private_file: Path | None = None
    """The private half, where it lies beside the public one."""


def callers_network(service: str = ADDRESS_SERVICE) -> str:
    """Ask a service at AWS which address this machine has on the internet.

    Returns:
        That address alone, in CIDR notation.

    Raises:
        InfrastructureError: The service can't be reached, or answers something else.
    """
    try:
        with urllib.request.urlopen(service, timeout=_TIMEOUT_S) as answer:
            text = answer.read(100).decode("ascii").strip()
        return f"{ipaddress.IPv4Address(text)}/32"
    except (OSError, ValueError) as error:
        raise InfrastructureError(
            f"your own address couldn't be found through {service} ({clause(error)}): say who may "
            "log in with --allow-ssh-from"
        ) from error


def find_key(aws: Aws, ssh_key: str | None, public_key: str | None) -> LoginKey:
    """Find the key to log in with.

    Args:
        public_key: File to import. None for both: the user's own.

    Raises:
        UsageError: There is no such key, or EC2 wouldn't take it.
    """
    if ssh_key is None:
        return read_key(_key_file(public_key))
    missing = "InvalidKeyPair.NotFound"
    if not aws.first("describe_key_pairs", "KeyPairs", missing, KeyNames=[ssh_key]):
        raise UsageError(f"--ssh-key: {aws.region} has no key pair {ssh_key!r}")
    return LoginKey(key_name=ssh_key)


def read_key(path: Path) -> LoginKey:
    """Read a public key's file.

    Raises:
        UsageError: It can't be read, or is no public key that EC2 imports.
    """
    try:
        text = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the public key {path} can't be read: {error}") from error
    if text.partition(" ")[0] not in _KINDS or "\n" in text:
        raise UsageError(f"{path} isn't a public key that EC2 takes ({' or '.join(_KINDS)})")
    private = path.with_suffix("")
    beside = path.suffix == ".pub" and private.is_file()
    return LoginKey(public_key=text, private_file=private if beside else None)


def _key_file(given: str | None) -> Path:
    if given is not None:
        return Path(given).expanduser()
    candidates = [Path.home() / ".ssh" / name for name in _KEY_FILES]
    for path in candidates:
        if path.is_file():
            return path
    raise UsageError(
        f"no public key was found ({', '.join(map(str, candidates))}): make one with "
        "ssh-keygen -t ed25519, or give --public-key or --ssh-key"
    )
