"""What listens on a machine of a rig, and what another machine reaches of it."""

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from tests.hosts.machine import Machine

_SSH_PORT = 22


@dataclass(frozen=True, kw_only=True)
class Listener:
    """A socket that waits for others: TCP's listening ones, and any of UDP."""

    protocol: str
    address: str
    port: int
    process: str
    """Name of the program that has it."""

    @property
    def on_loopback(self) -> bool:
        return self.address.startswith("127.") or self.address in ("::1", "::ffff:127.0.0.1")


def listeners(machine: Machine) -> list[Listener]:
    """List everything that listens on a machine, but for ssh's own port."""
    lines = machine.run(["ss", "-H", "-t", "-u", "-l", "-n", "-p"]).stdout.splitlines()
    found = [_parse(line) for line in lines]
    return [socket for socket in found if (socket.process, socket.port) != ("sshd", _SSH_PORT)]


def _parse(line: str) -> Listener:
    protocol, _, _, _, local, _, *users = line.split()
    address, _, port = local.rpartition(":")
    process = users[0].split('"')[1] if users else ""
    return Listener(
        protocol=protocol,
        address=address.partition("%")[0].strip("[]"),
        port=int(port),
        process=process,
    )


def reached(machine: Machine, addresses: Iterable[tuple[str, int]]) -> set[tuple[str, int]]:
    """Try TCP connections from a machine; each that is made sends garbage and is closed.

    Returns:
        The addresses and ports that accepted.
    """
    asked = json.dumps(sorted(addresses))
    done = machine.run([sys.executable, "-I", "-S", "-c", _TRY, asked])
    assert done.returncode == 0, done.stderr
    return {(address, port) for address, port in json.loads(done.stdout)}


_TRY = """
import json, os, socket, sys
reached = []
for address, port in json.loads(sys.argv[1]):
    try:
        with socket.create_connection((address, port), timeout=5) as connection:
            reached.append((address, port))
            connection.sendall(os.urandom(4096))
    except ConnectionRefusedError:
        pass
    except (ConnectionError, BrokenPipeError):
        pass  # it accepted and hung up on the garbage
print(json.dumps(reached))
"""
