"""Rendezvous addresses: parses `--init-method`, or takes the launcher's."""

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from paceline.distributed.placement import Placement
from paceline.errors import UsageError

_FORMS = "env://, tcp://HOST:PORT or file:///PATH"


@dataclass(frozen=True, kw_only=True)
class Address:
    """The rendezvous address of a training."""

    scheme: Literal["agent", "tcp", "file"]
    """agent: a store that torch's elastic agent keeps, or that our launcher has made a file for.
    tcp: rank 0 keeps it. file: in a file."""
    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return f"file://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"


def parse_init_method(text: str) -> Address | None:
    """Take an `--init-method` apart.

    Returns:
        None for env://, which leaves it to the environment.

    Raises:
        UsageError: It is none of the known forms.
    """
    try:
        parts = urlsplit(text)
        scheme, host, port = parts.scheme, parts.hostname or "", parts.port or 0
    except ValueError as error:
        raise UsageError(f"--init-method {text}: {error}. Write {_FORMS}") from None
    # The three known forms.
    if scheme == "env" and text == "env://":
        return None
    if scheme == "tcp" and host and port and not parts.path.strip("/"):
        return Address(scheme="tcp", host=host, port=port)
    if scheme == "file" and not parts.netloc and parts.path.strip("/"):
        return Address(scheme="file", path=parts.path)
    # None of them: say what is wrong with one that is nearly right.
    problem = ""
    if scheme == "tcp":
        problem = ", which has no port" if host and not port else ", which names no host"
        problem = ", which has a path" if host and port else problem
    elif scheme == "file":
        problem = f", which names the host {parts.netloc!r}" if parts.netloc else ", without a path"
    raise UsageError(f"--init-method is {text!r}{problem}. Write {_FORMS}")


def address_of(
    init_method: str | None, placement: Placement, agent_store: bool, store_file: str = ""
) -> Address:
    """Decide where this training's workers meet.

    Args:
        placement: Names the host and port of rank 0 where a launcher does.
        agent_store: Whether torch's elastic agent keeps a store there.
        store_file: Where our launcher has made a file for it instead.

    Raises:
        UsageError: Nobody says where rank 0 is.
    """
    # In the order of precedence: the option, our launcher's file, the environment's host and port.
    requested = parse_init_method(init_method) if init_method else None
    if requested is not None:
        return requested
    if store_file:
        return Address(scheme="agent", path=store_file)
    if not placement.master_addr or not placement.master_port:
        missing = "MASTER_ADDR" if not placement.master_addr else "MASTER_PORT"
        raise UsageError(
            f"{placement.world_size} workers need to know where rank 0 is, and {missing} is not "
            "set. Give --init-method tcp://HOST:PORT (HOST: rank 0's), the same to all workers, or "
            "set MASTER_ADDR and MASTER_PORT (mpirun: -x MASTER_ADDR=HOST -x MASTER_PORT=PORT)"
        )
    scheme: Literal["agent", "tcp"] = "agent" if agent_store else "tcp"
    return Address(scheme=scheme, host=placement.master_addr, port=placement.master_port)
