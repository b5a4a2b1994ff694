"""Starts a probe on each host, has the hosts examined, and leaves nothing behind on them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from socket import gethostname

from paceline._version import __version__
from paceline.doctor.check_result import fault
from paceline.doctor.checks.same import check_launcher
from paceline.doctor.diagnosis import Diagnosis, DiagnosisRequest, Examination
from paceline.doctor.host_pool import HostPool, PooledHost
from paceline.doctor.probes.handshake import Tokens
from paceline.errors import InfrastructureError
from paceline.launch.ssh.connection import connect
from paceline.launch.ssh.hostfile import Host
from paceline.launch.ssh.options import HostsOptions
from paceline.options.figures import plural

_PROBE = "paceline.doctor.probe"
_ROOT = "/"
"""Where probes are started: a directory that is on every host."""


@dataclass(frozen=True, kw_only=True)
class TrainingPlace:
    """Where a training would work, on every host."""

    directory: str
    """Working directory, where a host has none of its own."""
    runs: str
    """Where run directories go, from there."""

    def payload(self, directory: str | None = None) -> dict[str, object]:
        """Write the first message to a probe."""
        return {"directory": directory or self.directory, "place": self.runs}


def examine_here(
    request: DiagnosisRequest,
    place: TrainingPlace,
    workers: int | None,
    print_line: Callable[[str], None],
) -> Diagnosis:
    """Examine this machine, in a process apart.

    Args:
        workers: It is to have; None: as many as Paceline chooses.
        print_line: Called with what is being done, for the user.
    """
    here = Host(name=gethostname(), directory=".")
    with connect([here], HostsOptions(), here=True) as fleet:
        (connection,) = fleet.all
        if connection.lost:
            raise InfrastructureError(connection.lost)
        probe = connection.start(_PROBE, {**place.payload(), "tokens": asdict(Tokens.made())})
        pool = HostPool([PooledHost(name=here.name, probe=probe, slots=workers)])
        return Examination(pool, request, print_line).run()


def examine_hosts(
    hosts: Sequence[Host],
    options: HostsOptions,
    request: DiagnosisRequest,
    place: TrainingPlace,
    print_line: Callable[[str], None],
) -> Diagnosis:
    """Examine hosts; those that can't be reached are named, the others examined.

    Args:
        print_line: Called with what is being done, for the user.
    """
    print_line(f"connecting to {plural(len(hosts), 'host')}")
    # Probes start where every host has a directory; the training's own may be missing.
    at_root = [replace(host, directory=_ROOT) for host in hosts]
    with connect(at_root, options, any_version=True) as fleet:
        lost, tokens = fleet.lost, asdict(Tokens.made())
        pooled = [
            PooledHost(
                name=host.name,
                probe=connection.start(_PROBE, {**place.payload(host.directory), "tokens": tokens}),
                slots=host.slots,
                address=host.address,
            )
            for host, connection in zip(hosts, fleet.all, strict=True)
            if host.name not in lost
        ]
        diagnosis = Examination(HostPool(pooled), request, print_line).run()
        versions = {c.host.name: c.introduction.paceline for c in fleet.all if c.introduction}
        apart = tuple(check_launcher(versions, __version__))
        diagnosis = replace(diagnosis, findings=(*apart, *diagnosis.findings))
        return _with_lost(diagnosis, hosts, lost)


def _with_lost(diagnosis: Diagnosis, hosts: Sequence[Host], lost: Mapping[str, str]) -> Diagnosis:
    """Add the hosts that couldn't be reached."""
    missing = [fault(name, "ssh", why.removeprefix(f"{name}: ")) for name, why in lost.items()]
    return replace(
        diagnosis,
        hosts=tuple(host.name for host in hosts),
        findings=(*missing, *diagnosis.findings),
        unreachable=tuple(lost),
    )
