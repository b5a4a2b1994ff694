"""Names, addresses and ports of hosts, and the packets between them."""

from collections.abc import Iterator, Mapping, Sequence

from paceline.distributed.interface import is_loopback
from paceline.doctor.bandwidth import Pair
from paceline.doctor.check_result import CheckResult, common, fault, ok, warning
from paceline.doctor.facts import AddressChoice, Contact, HostFacts
from paceline.options.figures import listed

_UNKNOWN = "its name isn't known there"
_SURE_MTU = 1280
"""Every network that carries IPv6 takes packets of this size."""
_ON_BBR = (
    ". Where several hosts send to one at a time, an exchange took 1.25 to 1.77 times as long as "
    "the link needs, and 1.11 to 1.20 times with cubic, Linux's default. To compare: "
    "sysctl -w net.ipv4.tcp_congestion_control=cubic on all hosts"
)
Meanings = Mapping[str, Mapping[str, str | None]]


def check_name(host: str, facts: HostFacts) -> Iterator[CheckResult]:
    """Check what a host's own name stands for on itself."""
    own, means = facts.network.hostname, facts.network.hostname_means
    if means is None:
        yield warning(
            host,
            "name",
            f"its own name {own} stands for no address on it. Paceline needs none; other programs "
            "(torchrun, MPI) may: add it to /etc/hosts",
        )
    elif is_loopback(means):
        yield warning(
            host,
            "name",
            f"its own name {own} stands for {means} on it, which is loopback: who meets at that "
            "name is found by nobody. Paceline goes by addresses; torchrun needs --local-addr. "
            "Fix it in /etc/hosts",
        )
    else:
        yield ok(host, "name", "its own name stands for one of its addresses")


def check_meanings(
    hosts: Sequence[str], answers: Meanings, own: Mapping[str, set[str]]
) -> Iterator[CheckResult]:
    """Check what the hosts' names stand for on the others.

    Args:
        answers: What each host says of every name, by host.
        own: Every host's addresses.
    """
    for host in hosts:
        problems: dict[str, list[str]] = {}
        others = [other for other in hosts if other != host and other in answers]
        for other in others:
            problem = _misunderstanding(answers[other].get(host), own[host], own[other])
            if problem:
                problems.setdefault(problem, []).append(other)
        # Unknown to all others: a name of the ssh configuration.
        if others and len(problems.get(_UNKNOWN, ())) == len(others):
            yield ok(host, "name", "known to ssh alone: the others go by its address")
            continue
        for problem, who in problems.items():
            yield warning(
                host,
                "name",
                f"{listed(who)}: {problem}. Paceline goes by addresses; for other programs fix "
                "DNS or /etc/hosts there",
            )


def _misunderstanding(means: str | None, own: set[str], others: set[str]) -> str:
    """Say what is wrong with what a name stands for on another host; empty where nothing is."""
    if means is None:
        return _UNKNOWN
    if is_loopback(means):
        return f"it stands for {means} there, which is loopback"
    if means in own:
        return ""
    whose = "that host's own address" if means in others else "none of its addresses"
    return f"it stands for {means} there, {whose}"


def check_address(
    host: str, choice: AddressChoice, facts: HostFacts, given: str | None
) -> Iterator[CheckResult]:
    """Check at which address the others are to reach a host."""
    known = ", ".join(f"{i.name} {i.addresses[0]}" for i in facts.network.interfaces if i.addresses)
    if not choice.address:
        yield fault(
            host,
            "address",
            f"none leads to it from outside (it has {known or 'no interface'}). Name an interface "
            "that it has by --interface, or an address in the hostfile",
        )
    elif given is not None and choice.chosen_by != "the hostfile":
        yield warning(
            host,
            "address",
            f"the hostfile says {given}, which isn't its own (it has {known}); {choice.address} "
            f"is taken, by {choice.chosen_by}",
        )


def check_addresses(choices: Mapping[str, AddressChoice]) -> Iterator[CheckResult]:
    """Name the addresses that hosts are reached at, in one line for each way to choose them."""
    for by in dict.fromkeys(choice.chosen_by for choice in choices.values()):
        named = {h: c for h, c in choices.items() if c.chosen_by == by and c.address}
        shown = [
            f"{host} {choice.address} on {choice.interface.name if choice.interface else '?'}"
            for host, choice in named.items()
        ]
        if named:
            text = f"by {by}: {', '.join(shown)}"
            yield ok(named, "address", text)


def check_ports(
    contacts: Mapping[Pair, Contact],
    addresses: Mapping[str, str],
    port_ranges: Mapping[str, tuple[int, int]],
) -> Iterator[CheckResult]:
    """Check who gets through to whom.

    Args:
        contacts: What came of every try, by who tried and where to.
        addresses: Of every host.
        port_ranges: Ports that each host's kernel hands out.
    """
    targets = list(dict.fromkeys(target for _, target in contacts))
    # Ports, by the host that listens on them.
    for target in targets:
        incoming = {s: contact for (s, t), contact in contacts.items() if t == target}
        yield from _ports_of(target, incoming, addresses.get(target, "?"), port_ranges[target])
    # Routes: a host should leave by the address at which it is reached.
    for (source, target), contact in contacts.items():
        own = addresses.get(source, "")
        if contact.source and own and contact.source != own:
            yield warning(
                (source, target),
                "route",
                f"{source} goes to {target} from {contact.source}, not from {own} where the "
                "others reach it: two networks. Choose one by --interface",
            )
    if contacts and not any(contact.closed_ports for contact in contacts.values()):
        everybody = tuple(dict.fromkeys(name for pair in contacts for name in pair))
        yield ok(everybody, "ports", "open both ways everywhere")


def _ports_of(
    target: str, incoming: Mapping[str, Contact], address: str, port_range: tuple[int, int]
) -> Iterator[CheckResult]:
    """Check one host's ports: in one line where all the others say the same."""
    low, high = port_range
    # Nothing gets through from these.
    shut = [source for source, contact in incoming.items() if not contact.open_ports]
    if shut:
        contact = incoming[shut[0]]
        everybody = len(shut) == len(incoming) > 1
        who = "none of the others reaches" if everybody else f"{listed(shut)} can't reach"
        yield fault(
            (target,) if everybody else (*shut, target),
            "ports",
            f"{who} {target} at {address}, {_listed(contact.closed_ports)}: "
            f"{contact.problem}. Let TCP through between the hosts on all of {low}-{high}, which "
            "Gloo and NCCL use (security group, nft, ufw, firewalld), or choose another network "
            "by --interface",
        )
    # A firewall lets some ports through from these.
    half = [s for s, contact in incoming.items() if contact.open_ports and contact.closed_ports]
    if half:
        contact = incoming[half[0]]
        yield fault(
            (*half, target),
            "ports",
            f"{listed(half)} can reach {target} at {_listed(contact.open_ports)} but not at "
            f"{_listed(contact.closed_ports)}: {contact.problem}. Gloo and NCCL take any of "
            f"{low}-{high}: let TCP through on all of them, or narrow "
            "net.ipv4.ip_local_port_range to those that are open",
        )


def check_congestion(facts: Mapping[str, HostFacts]) -> Iterator[CheckResult]:
    """Say which congestion control TCP has, since streams that meet in one link go by it."""
    known = {host: host_facts.network.congestion for host, host_facts in facts.items()}
    for host, name in known.items():
        hint = _ON_BBR if name.startswith("bbr") and len(facts) > 1 else ""
        if name:
            yield ok(host, "TCP", f"congestion control {name}{hint}")


def check_mtu(choices: Mapping[str, AddressChoice]) -> Iterator[CheckResult]:
    """Compare the sizes of packets that the hosts' interfaces take."""
    sizes = {h: (c.interface.mtu, c.interface.name) for h, c in choices.items() if c.interface}
    usual = common([str(size) for size, _ in sizes.values()]) if sizes else ""
    for host, (size, name) in sizes.items():
        if str(size) == usual:
            yield ok(host, "MTU", usual)
        else:
            yield warning(
                host,
                "MTU",
                f"{name} takes packets of {size} bytes, and those of the others {usual}: larger "
                f"ones may vanish. ip link set {name} mtu {min(size, int(usual))} on all of them",
            )


def check_packets(
    contacts: Mapping[Pair, Contact], mtus: Mapping[str, int]
) -> Iterator[CheckResult]:
    """Check whether full packets get through, in one line for each host that they don't reach."""
    small: dict[tuple[str, int, int], list[str]] = {}
    for (source, target), contact in contacts.items():
        largest, mtu = contact.largest_packet, mtus[source]
        if largest is not None and largest < mtu:
            small.setdefault((target, mtu, largest), []).append(source)
    for (target, mtu, largest), sources in small.items():
        shown = f"only those of {largest} do" if largest else "only small ones do"
        yield warning(
            (*sources, target),
            "packets",
            f"packets of {mtu} bytes from {listed(sources)} don't reach {target}, {shown}: "
            "something on the way takes smaller ones. Set the MTU of all of them to "
            f"{largest or _SURE_MTU}",
        )


def _listed(ports: Sequence[int]) -> str:
    return f"{'port' if len(ports) == 1 else 'ports'} {', '.join(map(str, ports))}"
