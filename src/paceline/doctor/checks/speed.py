"""How fast the links between hosts are, and the all-reduce over all of them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from paceline.doctor.bandwidth import HostLink, Slow, slow_hosts, slow_links, slowest
from paceline.doctor.check_result import CheckResult, fault, ok, warning
from paceline.doctor.facts import AddressChoice
from paceline.options.figures import show_bandwidth, show_bytes, show_time, show_whole_percent
from paceline.options.text import clause

_GRADIENTS_BYTES = 100e6
_GIGABIT = 100e6
"""What a network of 1 Gbit/s carries, less 20 %."""
_OF_INTERFACE = 0.4
_GLOO_BYTES_PER_S = 0.25e9
"""What Gloo itself reaches (0.5 GB/s on 2 cores), halved: beyond it the link isn't the limit."""
_SHARE_OF_LINK = 0.5
_TIME_S = 0.4
_MAX_SLOW = 4
_MIN_BYTES, _MAX_BYTES = 64 << 10, 32 << 20


@dataclass(frozen=True, kw_only=True)
class AllReduce:
    """An all-reduce over all hosts, one worker each."""

    hosts: int
    backend: str
    size_bytes: int
    seconds: float | None = None
    """Of one, the slowest host's; None: it failed."""
    is_right: bool = False
    problem: str = ""

    @property
    def bus_bytes_per_s(self) -> float | None:
        """What each host sends and receives in a second, in a ring: 2 (n - 1) / n of the size."""
        if not self.seconds:
            return None
        return 2 * (self.hosts - 1) / self.hosts * self.size_bytes / self.seconds

    def to_json(self) -> dict[str, object]:
        """Give it as JSON."""
        return asdict(self) | {"bus_bytes_per_s": self.bus_bytes_per_s}


def size_to_reduce(links: Sequence[HostLink]) -> int:
    """Choose how much to add up so that it takes a moment on the slowest link."""
    link = slowest(links)
    rate = (link.best_bytes_per_s or 0.0) if link is not None else 0.0
    return max(_MIN_BYTES, min(_MAX_BYTES, int(rate * _TIME_S))) // 4096 * 4096


def check_links(
    links: Sequence[HostLink], hosts: Sequence[str], choices: Mapping[str, AddressChoice]
) -> Iterator[CheckResult]:
    """Check the links between hosts."""
    for link in links:
        if link.problem:
            yield _broken(link)
    # Slow links: by host where all of its links are slow, one by one otherwise, or all in one line.
    slow = slow_links(links)
    slow_in_all = slow_hosts(slow, hosts)
    for host in slow_in_all:
        yield _slow_host(host, [s for s in slow if host in (s.link.source, s.link.target)])
    rest = [s for s in slow if not {s.link.source, s.link.target} & set(slow_in_all)]
    if len(rest) > _MAX_SLOW:
        yield _many_slow(rest)
    else:
        yield from map(_slow, rest)
    if (worst := slowest(links)) is not None:
        yield _bandwidth(worst, hosts)
    others = {host: choice for host, choice in choices.items() if host not in slow_in_all}
    yield from _below_interface(links, others)


def _bandwidth(slowest_link: HostLink, hosts: Sequence[str]) -> CheckResult:
    rate = slowest_link.best_bytes_per_s or 0.0
    # A ring sends 2 (n - 1) / n of the data (Patarasuk and Yuan 2009).
    ring_s = 2 * (len(hosts) - 1) / len(hosts) * _GRADIENTS_BYTES / max(rate, 1.0)
    text = (
        f"the slowest link is {slowest_link.source} to {slowest_link.target}, "
        f"{show_bandwidth(rate)}: gradients of 100 MB need {show_time(ring_s)} a step"
    )
    if rate >= _GIGABIT:
        return ok(hosts, "bandwidth", text)
    text += ". Use a faster network (--interface), or larger batches"
    return warning(hosts, "bandwidth", text)


def _broken(link: HostLink) -> CheckResult:
    pair = (link.source, link.target)
    if "nothing went through" in link.problem or "too little" in link.problem:
        text = (
            f"from {link.source} to {link.target} small messages pass and large ones don't "
            f"({link.problem}): the MTU of both hosts is larger than what lies between them "
            "takes. Lower it on both (ip link set DEVICE mtu 1280), or fix the switch or tunnel"
        )
        return fault(pair, "packets", text)
    text = f"from {link.source} to {link.target} nothing could be measured: {link.problem}"
    return fault(pair, "links", text)


def _slow(slow: Slow) -> CheckResult:
    link, parts = slow.link, []
    if slow.share is not None and link.best_bytes_per_s is not None:
        share = show_whole_percent(slow.share)
        parts.append(f"{show_bandwidth(link.best_bytes_per_s)}, {share} of what is usual")
    if slow.times is not None and link.round_trip_s is not None:
        parts.append(f"round-trip {show_time(link.round_trip_s)}, {slow.times:.1f} x the usual")
    text = f"{link.source} to {link.target} is slow ({'; '.join(parts)}): look at what lies between"
    return warning((link.source, link.target), "links", text)


def _many_slow(slow: Sequence[Slow]) -> CheckResult:
    worst = sorted(slow, key=lambda each: each.link.best_bytes_per_s or 0.0)[:_MAX_SLOW]
    named = dict.fromkeys(name for s in slow for name in (s.link.source, s.link.target))
    shown = ", ".join(f"{each.link.source} to {each.link.target}" for each in worst)
    text = f"{len(slow)} links are much slower than usual ({shown} and others): two racks or zones?"
    return warning(named, "links", text)


def _slow_host(host: str, slow: Sequence[Slow]) -> CheckResult:
    rates = [s.link.best_bytes_per_s or 0.0 for s in slow if s.share is not None]
    times = [s.link.round_trip_s or 0.0 for s in slow if s.times is not None]
    shown = [f"{show_bandwidth(min(rates))} at the least"] if rates else []
    shown += [f"round-trip up to {show_time(max(times))}"] if times else []
    return warning(
        host,
        "links",
        f"its links to all the others are slow ({', '.join(shown)}), and all hosts wait for "
        "it in every step: look at its cable, switch port, duplex (ethtool) and instance type, or "
        "leave it out",
    )


def _below_interface(
    links: Sequence[HostLink], choices: Mapping[str, AddressChoice]
) -> Iterator[CheckResult]:
    """Compare the best link from each host with what its interface says it can."""
    for host, choice in choices.items():
        speed = choice.interface.speed_bytes_per_s if choice.interface is not None else None
        rates = [k.best_bytes_per_s for k in links if k.source == host and k.best_bytes_per_s]
        if speed is not None and rates and max(rates) < _OF_INTERFACE * speed:
            yield warning(
                host,
                "links",
                f"its interface says {show_bandwidth(speed)}, and it sends "
                f"{show_bandwidth(max(rates))} at best: a slower switch, a limit of the instance "
                "type, or a busy processor",
            )


def check_all_reduce(
    reduced: AllReduce, links: Sequence[HostLink], hosts: Sequence[str]
) -> CheckResult:
    """Check the all-reduce over all hosts, against the slowest link."""
    rate = reduced.bus_bytes_per_s
    if rate is None or reduced.seconds is None:
        return fault(
            hosts,
            "all-reduce",
            f"over {reduced.backend} it failed: {clause(reduced.problem)}. Fix the faults above "
            "first; then see docs/reference/backends.md for what the backend needs",
        )
    if not reduced.is_right:
        return fault(
            hosts,
            "all-reduce",
            f"over {reduced.backend} its result is wrong: a network card, a GPU or memory damages "
            "data. Take hosts out until it is right; don't train on them",
        )
    text = (
        f"{show_bytes(reduced.size_bytes)} over {reduced.backend} in {show_time(reduced.seconds)}, "
        f"right, {show_bandwidth(rate)} on each host"
    )
    # It should come near the slowest link, or what Gloo can do at best.
    link = slowest(links)
    limit = (link.best_bytes_per_s or 0.0) if link is not None else 0.0
    if reduced.backend == "gloo":
        limit = min(limit, _GLOO_BYTES_PER_S)
    if rate < _SHARE_OF_LINK * limit:
        return warning(
            hosts,
            "all-reduce",
            f"{text}: less than half of the {show_bandwidth(limit)} that the slowest link carries. "
            "Are the processors busy, or does it take another interface (--interface)?",
        )
    return ok(hosts, "all-reduce", text)
