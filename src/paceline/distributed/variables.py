"""Values of environment variables, and ports that all workers of a job derive alike."""

import zlib
from collections.abc import Mapping

from paceline.errors import UsageError

Environment = Mapping[str, str]

_FIRST_PORT, _PORTS = 20_000, 12_000
"""Below the ports that Linux hands out by itself (32768 and up)."""


def integer(environment: Environment, name: str, default: int) -> int:
    """Read a whole number.

    Raises:
        UsageError: The variable holds something else.
    """
    text = environment.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"the variable {name} should be a whole number, not {text!r}") from None


def first_of(environment: Environment, *names: str) -> str:
    """Give the first of these variables that isn't empty; an empty text where none is."""
    return next((environment[name] for name in names if environment.get(name)), "")


def first_integer(environment: Environment, names: tuple[str, ...], default: int) -> int:
    """Read the first of these variables that is set."""
    found = next((name for name in names if environment.get(name)), None)
    return default if found is None else integer(environment, found, default)


def port_of_job(job: int, step: int = 0) -> int:
    """Derive a port from a job's number, so that two jobs on one node don't meet."""
    return _FIRST_PORT + (job + 1000 * step) % _PORTS


def port_of_name(job: str) -> int:
    """Derive a port from a job's name."""
    return port_of_job(zlib.crc32(job.encode()))
