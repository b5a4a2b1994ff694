"""Hosts as users write them: `--hosts node0:4,alice@node1:2`, or a file with a line each."""

import ipaddress
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.errors import UsageError
from paceline.launch.worker_count import MAX_WORKERS
from paceline.options.quantities import parse_count

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9._-]{0,63}\$?")
_ADDRESS = re.compile(r"[0-9A-Fa-f:.]{2,45}(?:%[A-Za-z0-9][A-Za-z0-9._-]{0,14})?")
"""Of IPv6 also with a scope: the name of an interface."""
_FIELDS = {
    "slots": "slots",
    "user": "user",
    "port": "port",
    "address": "address",
    "python": "python",
    "dir": "directory",
}
"""The keys of a hostfile's lines, and the fields of a host that they give."""
_EXAMPLE = "--hosts node0:4,alice@node1:2 (host:workers)"


@dataclass(frozen=True, kw_only=True)
class Host:
    """One host to train on."""

    name: str
    """What ssh is given: a name, an address, or an alias of the user's ssh configuration."""
    slots: int | None = None
    """Workers on it; None: one per GPU, or as --workers says."""
    user: str | None = None
    port: int | None = None
    """Of its ssh server."""
    address: str | None = None
    """At which the other hosts reach it; None: the one that ssh reached."""
    python: str | None = None
    """Its Python that has Paceline; None: at the same path as here."""
    directory: str | None = None
    """Working directory on it; None: the same as here."""

    def __post_init__(self) -> None:
        """Check every part: none may be taken for an option, or for anything else than it is.

        Raises:
            UsageError: A part isn't what it should be.
        """
        if not is_host_name(self.name):
            raise UsageError(f"{self.name!r} is no host name. Write {_EXAMPLE}")
        if self.address is not None and not is_host_name(self.address):
            raise UsageError(f"{self.name}: {self.address!r} is no address")
        if self.user is not None and not _USER.fullmatch(self.user):
            raise UsageError(f"{self.name}: {self.user!r} is no user name")
        if self.slots is not None and not 1 <= self.slots <= MAX_WORKERS:
            raise UsageError(
                f"{self.name}: {self.slots} workers; it must be at least 1, at most {MAX_WORKERS}"
            )
        if self.port is not None and not 0 < self.port < 65536:
            raise UsageError(f"{self.name}: {self.port} is no port")
        for part in (self.python, self.directory):
            if part is not None and (not part or not part.isprintable()):
                raise UsageError(f"{self.name}: {part!r} is no path")
        if self.python is not None and self.python.startswith("~"):
            raise UsageError(f"{self.name}: python={self.python}: write the absolute path")


def is_host_name(text: str) -> bool:
    """Tell whether a text is a host name or an address."""
    if _NAME.fullmatch(text):
        return True
    if not _ADDRESS.fullmatch(text):  # the standard library takes anything for a scope
        return False
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Read `--hosts`: names with commas between them, each with `user@` and `:workers` if need be.

    IPv6 addresses stand in brackets: `[fd00::1]:2`.

    Raises:
        UsageError: Something in it can't be read, or a host stands in it twice.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise UsageError(f"--hosts {text!r} has an empty name. Write {_EXAMPLE}")
    return _each_once([_parse_word(word) for word in words])


def parse_hostfile(text: str, name: str = "the hostfile") -> tuple[Host, ...]:
    """Read a hostfile: a host a line, then `slots=4 user=alice port=22 address=10.0.0.5 ...`.

    Args:
        text: Its content. What follows a `#` is a comment.

    Raises:
        UsageError: A line can't be read; the message has its number.
    """
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            words = shlex.split(line, comments=True)
            if words:
                hosts.append(_parse_line(words))
        except (UsageError, ValueError) as error:
            raise UsageError(f"{name}, line {number}: {error}") from None
    if not hosts:
        raise UsageError(f"{name} names no host")
    return _each_once(hosts)


def hostfile_line(host: Host) -> str:
    """Write a host as a line that `parse_hostfile` reads."""
    named = {key: getattr(host, field) for key, field in _FIELDS.items()}
    words = (f"{key}={value}" for key, value in named.items() if value is not None)
    return shlex.join([host.name, *words])


def _parse_word(word: str) -> Host:
    user, at, rest = word.rpartition("@")
    name, slots = rest, ""
    if rest.startswith("["):
        name, _, slots = rest[1:].partition("]")
        slots = slots.removeprefix(":")
    elif rest.count(":") == 1:
        name, _, slots = rest.partition(":")
    host = Host(name=name, user=user if at else None)
    if rest.endswith(":") and name != rest:
        raise UsageError(f"{word!r} has no number of workers after its colon. Write {_EXAMPLE}")
    return replace(host, slots=_whole(slots, "workers")) if slots else host


def _parse_line(words: Sequence[str]) -> Host:
    host = _parse_word(words[0])
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals or key not in _FIELDS:
            raise UsageError(f"{word!r} is unknown. Known: {', '.join(_FIELDS)}, each as key=value")
        given: Any = _whole(value, key) if key in ("slots", "port") else value
        host = replace(host, **{_FIELDS[key]: given})
    return host


def _whole(text: str, what: str) -> int:
    number = parse_count(text)
    if number is None:
        if what == "port":
            raise UsageError(f"port {text!r}: it must be a whole number from 1 to 65535")
        raise UsageError(f"{text!r} is no number of {what}. Write a whole number, as in {_EXAMPLE}")
    return number


def _each_once(hosts: Sequence[Host]) -> tuple[Host, ...]:
    names = [host.name for host in hosts]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UsageError(f"the host {twice[0]} is named twice: name it once, with all its workers")
    return tuple(hosts)
