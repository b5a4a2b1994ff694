"""Compares what hosts report before a training, and assigns ranks to them. Pure."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

CLOCK_LIMIT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class HostInfo:
    """What one host reports of itself, before it is assigned ranks."""

    name: str
    address: str
    """At which the others are to reach it."""
    port: int
    """At which it answers them now."""
    workers: int
    newest: int
    """Step of its newest snapshot; -1 for none."""
    shared: bool
    """Whether it sees the launcher's run directory."""
    facts: Mapping[str, str]
    """What has to be the same on all hosts."""


def differences(infos: Sequence[HostInfo], settled: Collection[str] = ()) -> dict[str, str]:
    """Say which hosts differ from the others, and in what.

    Args:
        settled: Names of hosts that count before the others: the first of them is compared with.
    """
    if not infos:
        return {}
    first = next((info for info in infos if info.name in settled), infos[0])
    by_host = {info.name: "; ".join(_differences(first, info)) for info in infos}
    return {name: text for name, text in by_host.items() if text}


def _differences(first: HostInfo, other: HostInfo) -> Iterator[str]:
    for fact in dict.fromkeys((*first.facts, *other.facts)):
        ours, theirs = first.facts.get(fact, "none"), other.facts.get(fact, "none")
        if ours != theirs:
            yield f"{other.name} has {fact} {theirs}, {first.name} has {ours}"


def first_ranks(infos: Sequence[HostInfo]) -> list[int]:
    """Give each host's first rank: ranks go through the hosts in their order."""
    firsts, rank = [], 0
    for info in infos:
        firsts.append(rank)
        rank += info.workers
    return firsts


def others_of(infos: Sequence[HostInfo], own: int) -> list[tuple[str, str, int]]:
    """List name, address and port of all hosts but one, for it to try."""
    return [(s.name, s.address, s.port) for place, s in enumerate(infos) if place != own]


def attribute_unreachable(
    unreachable: Mapping[str, Sequence[str]], addresses: Mapping[str, str]
) -> dict[str, str]:
    """Say which host isn't reached, or reaches nobody.

    Args:
        unreachable: By host, the names of those that it doesn't reach.
        addresses: At which each host should be reached.

    Returns:
        The host that most of the failed ways have in common, and what to do; nothing where all is
        well.
    """
    ways = [(name, other) for name, others in unreachable.items() for other in others]
    if not ways:
        return {}
    # Each failed way counts for both of its ends: the host in most of them is to blame.
    counted = Counter(name for way in ways for name in way)
    worst = max(addresses, key=lambda name: counted[name])
    lines = [f"{name} doesn't reach {other} at {addresses[other]}" for name, other in ways]
    return {
        worst: f"{'; '.join(lines)}. Does a firewall stand between them? If it is the wrong "
        "address, name the right one by address= in the hostfile (`paceline doctor --hosts` shows "
        "them)"
    }


def clock_lines(offsets_s: Mapping[str, float | None]) -> list[str]:
    """Name hosts whose clocks are far from the launcher's; times in logs then don't fit together.

    Nothing is decided by comparing clocks.
    """
    return [
        f"{name}: its clock is {abs(offset_s):.0f} s {'ahead' if offset_s > 0 else 'behind'}; "
        "times in its logs are off by that"
        for name, offset_s in offsets_s.items()
        if offset_s is not None and abs(offset_s) > CLOCK_LIMIT_S
    ]
