"""At which address the others reach a host: chosen from what it and they know."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.distributed.interface import is_loopback
from paceline.doctor.facts import Interface, NetworkFacts


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
        facts: What the host knows of itself.
        given: What the hostfile says.
        meanings: What its name stands for on the other hosts.
        interface: `--interface`.
    """
    if interface is not None:
        known = next((known for known in facts.interfaces if known.name == interface), None)
        address = known.addresses[0] if known is not None else ""
        return AddressChoice(address=address, chosen_by=f"--interface {interface}", interface=known)
    own = [a for known in facts.interfaces for a in known.addresses if not is_loopback(a)]
    candidates: list[tuple[str | None, str]] = [
        (given, "the hostfile"),
        *((meaning, "name") for meaning in meanings),
        (facts.ssh_address, "ssh"),
        (facts.default_address, "default route"),
        *((a, "order of interfaces") for a in own),
    ]
    for found, by in candidates:
        if found is not None and found in own:
            return AddressChoice(address=found, chosen_by=by, interface=facts.interface_with(found))
    return AddressChoice(address="", chosen_by="nothing", interface=None)


def meanings_of(
    name: str, answers: Mapping[str, Mapping[str, str | None]], own: str
) -> list[str | None]:
    """List what a name stands for on the other hosts.

    Args:
        name: The host's.
        answers: What each host says of names, by host.
        own: The host whose word doesn't count.
    """
    return [known.get(name) for host, known in answers.items() if host != own]
