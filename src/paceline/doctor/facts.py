"""What a host tells about itself, and at which address the others reach it.

All fields have defaults: a host may not be able to tell all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.distributed.interface import is_loopback

EPHEMERAL = (32768, 60999)
"""Linux's own range of ports that it hands out."""


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface that is up."""

    name: str = ""
    addresses: tuple[str, ...] = ()
    """IPv4 first; without link-local IPv6 ones, which the others can't use."""
    mtu: int = 0
    speed_bytes_per_s: float | None = None
    """As its driver says; None for virtual ones that don't."""


@dataclass(frozen=True, kw_only=True)
class NetworkFacts:
    """Names and addresses of a host."""

    hostname: str = ""
    hostname_means: str | None = None
    """The address that its own name stands for on it; None: for none."""
    default_address: str = ""
    """Its address on the default route; a loopback one where there is none."""
    ssh_address: str = ""
    """Its address at which ssh came in; empty without ssh."""
    interfaces: tuple[Interface, ...] = ()
    port_range: tuple[int, int] = EPHEMERAL
    """Ports that the kernel hands out, which Gloo and NCCL use."""
    congestion: str = ""
    """TCP's congestion control, such as cubic; empty where the kernel doesn't say."""

    def interface_with(self, address: str) -> Interface | None:
        """Find the interface that has an address."""
        return next(
            (interface for interface in self.interfaces if address in interface.addresses), None
        )


@dataclass(frozen=True, kw_only=True)
class SoftwareFacts:
    """What is installed on a host."""

    versions: Mapping[str, str] = field(default_factory=dict)
    """By name, `Paceline` and `torch` among them; `none` where it isn't there."""
    torch_problem: str = ""
    """Why torch can't be imported; empty where it can."""


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """Processors and memory of a host, and who else uses them."""

    processor: str = ""
    capability: str = ""
    """Vector instructions that torch uses."""
    cores: int = 1
    """That this process may use."""
    quota_cores: float | None = None
    """What the control group allows on average; None: no limit."""
    steal_share: float | None = None
    """Share of the time in which the hypervisor ran something else; None: unknown."""
    busy_cores: float = 0.0
    """Cores that were busy while nothing of ours ran."""
    busiest: tuple[str, ...] = ()
    """The busiest processes, such as `python (4711) 180%`."""
    memory_bytes: int = 0
    available_bytes: int = 0
    limit_bytes: int | None = None
    """The control group's limit of memory; None: none below the machine's."""
    swap_used_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class LimitFacts:
    """What a process on this host may have."""

    open_files: int | None = None
    """None: as many as it likes."""
    locked_bytes: int | None = None
    rdma_devices: tuple[str, ...] = ()
    """InfiniBand, RoCE and EFA devices, which need locked memory."""
    shared_memory_bytes: int | None = None
    """Size of /dev/shm; None: there is none."""


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """GPUs of a host."""

    kind: str = ""
    """`cuda` or `xpu`; empty: none."""
    names: tuple[str, ...] = ()
    memory_bytes: tuple[int, ...] = ()
    free_bytes: tuple[int, ...] = ()
    wrong_copies: tuple[str, ...] = ()
    """Ways on which data arrived damaged, such as `cuda:0 to cuda:1`."""
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class DiskFacts:
    """The place where run directories go."""

    directory: str = ""
    missing: str = ""
    """The working directory, where it isn't there."""
    free_bytes: int = 0
    total_bytes: int = 0
    write_bytes_per_s: float | None = None
    """Of a file that is written and synced."""
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """All that a host tells about itself."""

    network: NetworkFacts = field(default_factory=NetworkFacts)
    software: SoftwareFacts = field(default_factory=SoftwareFacts)
    machine: MachineFacts = field(default_factory=MachineFacts)
    limits: LimitFacts = field(default_factory=LimitFacts)
    gpus: GpuFacts = field(default_factory=GpuFacts)
    disk: DiskFacts = field(default_factory=DiskFacts)
    unknown: Mapping[str, str] = field(default_factory=dict)
    """What couldn't be found out, and why: by the names of the fields above."""


@dataclass(frozen=True, kw_only=True)
class Contact:
    """What one host found when it connected to another."""

    open_ports: tuple[int, ...] = ()
    closed_ports: tuple[int, ...] = ()
    problem: str = ""
    """Of the first port that couldn't be reached."""
    source: str = ""
    """Address from which it went."""
    clock_ahead_s: float | None = None
    """How far the other's clock is ahead of this one's."""
    clock_error_s: float = 0.0
    """Half the round-trip."""
    largest_packet: int | None = None
    """Largest packet that arrived undivided, in bytes with its headers; None: unknown."""


@dataclass(frozen=True, kw_only=True)
class AddressChoice:
    """The address at which the others are to reach a host."""

    address: str
    """Empty: there is none."""
    chosen_by: str
    interface: Interface | None


def choose_address(
    facts: NetworkFacts, given: str | None, meanings: Sequence[str | None], interface: str | None
) -> AddressChoice:
    """Choose the address of one of several hosts.

    Args:
        meanings: What its name stands for on the other hosts.
    """
    if interface is not None:
        known = next((known for known in facts.interfaces if known.name == interface), None)
        address = known.addresses[0] if known is not None else ""
        return AddressChoice(address=address, chosen_by=f"--interface {interface}", interface=known)
    # Without --interface: the first candidate that is one of the host's own, and not loopback.
    own = [a for known in facts.interfaces for a in known.addresses if not is_loopback(a)]
    candidates: list[tuple[str | None, str]] = [
        (given, "the hostfile"),
        *((meaning, "name") for meaning in meanings),
        (facts.ssh_address, "ssh"),
        (facts.default_address, "default route"),
        *((a, "order of interfaces") for a in own),
    ]
    for candidate, by in candidates:
        if candidate is not None and candidate in own:
            return AddressChoice(
                address=candidate, chosen_by=by, interface=facts.interface_with(candidate)
            )
    return AddressChoice(address="", chosen_by="nothing", interface=None)


def meanings_of(
    name: str, answers: Mapping[str, Mapping[str, str | None]], own: str
) -> list[str | None]:
    """List what a name stands for on the other hosts.

    Args:
        answers: What each host says of names, by host.
        own: The host whose word doesn't count.
    """
    return [known.get(name) for host, known in answers.items() if host != own]
