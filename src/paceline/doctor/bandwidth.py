"""Measured links between hosts, which of them are slow, and in which order they are measured."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median

SLOW = 0.5
"""A link with less than this share of the usual bandwidth is slow."""
FAR = 3.0
"""A link with more than so many times the usual round-trip is slow."""
_MEASURABLE_PER_S = 1.25e9
"""Beyond 10 Gbit/s the processors set the pace of the measurement rather than the network."""
_MIN_FAR_S = 0.0003
"""Smaller differences don't matter."""
_MEASURING_S, _MIN_S, _MAX_S = 20.0, 0.15, 0.5

Pair = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class HostLink:
    """The link from one host to another."""

    source: str
    target: str
    bandwidth_bytes_per_s: float | None = None
    """Of one TCP stream; None: it couldn't be measured."""
    several_bytes_per_s: float | None = None
    """Of several TCP streams at once, all together."""
    round_trip_s: float | None = None
    """Median of single bytes."""
    problem: str = ""

    @property
    def best_bytes_per_s(self) -> float | None:
        """The bandwidth of one stream or several, whatever is more."""
        known = (self.bandwidth_bytes_per_s, self.several_bytes_per_s)
        return max((value for value in known if value is not None), default=None)

    def to_json(self) -> dict[str, object]:
        """Give it as JSON."""
        rest = {n: v for n, v in asdict(self).items() if n not in ("source", "target")}
        return {"from": self.source, "to": self.target, **rest}


@dataclass(frozen=True, kw_only=True)
class Slow:
    """A link that is much slower than the others."""

    link: HostLink
    share: float | None = None
    """Its bandwidth as a share of the usual one; None where the bandwidth isn't what is bad."""
    times: float | None = None
    """Its round-trip as a multiple of the usual one; None where that isn't what is bad."""


def rounds(hosts: Sequence[str]) -> list[list[Pair]]:
    """Pair all hosts with one another so that none is in two pairs of a round.

    The circle method of tournaments: one host stays, the others turn. With N hosts there are N - 1
    rounds, N of them where N is odd.
    """
    circle: list[str | None] = [*hosts, *([None] if len(hosts) % 2 else [])]
    pairings = []
    for _ in range(len(circle) - 1):
        # Hosts opposite each other are paired; then all but the first move on by one.
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        pairings.append([(a, b) for a, b in pairs if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return pairings


def measuring_s(hosts: int) -> float:
    """Say for how long each measurement may last, so that all of them end in reasonable time."""
    # Each round has two directions, each measured with one stream and with several.
    games = 4 * max(1, hosts - 1 + hosts % 2)
    return min(_MAX_S, max(_MIN_S, _MEASURING_S / games))


def slow_links(links: Sequence[HostLink]) -> list[Slow]:
    """Find the links that are much slower than usual.

    What is usual is the median of all hosts' best links. The median of all links wouldn't do: of
    three hosts one slow one makes four links of six slow.
    """
    rate = min(_usual([(link, link.best_bytes_per_s) for link in links], max), _MEASURABLE_PER_S)
    time = _usual([(link, link.round_trip_s) for link in links], min)
    compared = (_compared(link, rate, time) for link in links)
    return [slow for slow in compared if slow.share is not None or slow.times is not None]


def _compared(link: HostLink, usual_rate: float, usual_time: float) -> Slow:
    rate, time = link.best_bytes_per_s, link.round_trip_s
    # A round trip has to be longer by a factor and by a time: tiny ones differ without meaning.
    is_slow = rate is not None and rate < SLOW * usual_rate
    is_far = time is not None and time > max(FAR * usual_time, usual_time + _MIN_FAR_S)
    return Slow(
        link=link,
        share=rate / usual_rate if rate is not None and is_slow else None,
        times=time / usual_time if time is not None and is_far and usual_time else None,
    )


def _usual(
    values: Sequence[tuple[HostLink, float | None]], best_of: Callable[[Sequence[float]], float]
) -> float:
    """Give the median of all hosts' best values; 0 where nothing was measured."""
    by_host: dict[str, list[float]] = {}
    for link, value in values:
        for host in (link.source, link.target):
            by_host.setdefault(host, []).extend([] if value is None else [value])
    best = [best_of(own) for own in by_host.values() if own]
    return median(best) if best else 0.0


def slow_hosts(slow: Sequence[Slow], hosts: Sequence[str]) -> list[str]:
    """Name the hosts whose links are slow to all the others, in one direction at least.

    With fewer than three hosts nobody can tell which end it is.
    """
    if len(hosts) < 3:
        return []
    pairs = [{each.link.source, each.link.target} for each in slow]
    in_all = []
    for host in hosts:
        peers = {name for pair in pairs if host in pair for name in pair} - {host}
        if len(peers) == len(hosts) - 1:
            in_all.append(host)
    # All hosts slow to all others: then the network is slow, and none of them stands out.
    return in_all if len(in_all) < len(hosts) else []


def slowest(links: Sequence[HostLink]) -> HostLink | None:
    """Give the link with the least bandwidth."""
    known = [link for link in links if link.best_bytes_per_s is not None]
    return min(known, key=lambda link: link.best_bytes_per_s or 0.0, default=None)
