"""What hosts say before a training, compared; and who gets which ranks. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.launch.hosts.wire import Message

CLOCK_LIMIT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What one host says of itself before it is given its seat."""

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

    @staticmethod
    def read(name: str, message: Message) -> "Sight":
        """Read a host's message."""
        facts = message["facts"]
        assert isinstance(facts, dict)
        return Sight(
            name=name,
            address=str(message["address"]),
            port=int(str(message["port"])),
            workers=int(str(message["workers"])),
            newest=int(str(message["newest"])),
            shared=bool(message["shared"]),
            facts={str(n): str(v) for n, v in facts.items()},
        )


def differences(sights: Sequence[Sight]) -> list[str]:
    """Say in what hosts differ from the first one, a line for each."""
    if not sights:
        return []
    first = sights[0]
    lines = []
    for sight in sights[1:]:
        for fact in dict.fromkeys((*first.facts, *sight.facts)):
            ours, theirs = first.facts.get(fact, "none"), sight.facts.get(fact, "none")
            if ours != theirs:
                lines.append(f"{sight.name} has {fact} {theirs}, {first.name} has {ours}")
    return lines


def first_ranks(sights: Sequence[Sight]) -> list[int]:
    """Give each host's first rank: ranks go through the hosts in their order."""
    firsts, rank = [], 0
    for sight in sights:
        firsts.append(rank)
        rank += sight.workers
    return firsts


def others_of(sights: Sequence[Sight], own: int) -> list[tuple[str, str, int]]:
    """List name, address and port of all hosts but one, for it to try."""
    return [(s.name, s.address, s.port) for place, s in enumerate(sights) if place != own]


def unreachable_text(found: Mapping[str, Sequence[str]], addresses: Mapping[str, str]) -> str:
    """Say which hosts don't reach which, and what to do.

    Args:
        found: By host, the names of those that it doesn't reach.
        addresses: At which each host should be reached.
    """
    lines = [
        f"{name} doesn't reach {other} at {addresses[other]}"
        for name, others in found.items()
        for other in others
    ]
    return (
        f"{'; '.join(lines)}. Does a firewall stand between them? If it is the wrong address, name "
        "the right one by address= in the hostfile (`paceline doctor --hosts` shows them)"
    )


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
