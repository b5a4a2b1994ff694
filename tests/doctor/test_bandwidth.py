"""Rounds, slow links, and the host that they have in common."""

from collections.abc import Collection, Sequence
from itertools import combinations

import pytest

from paceline.doctor.bandwidth import (
    HostLink,
    measuring_s,
    rounds,
    slow_hosts,
    slow_links,
    slowest,
)

FAST, SLOW = 110e6, 12e6


def link(source: str, target: str, rate: float | None = FAST, time_s: float = 1e-4) -> HostLink:
    return HostLink(source=source, target=target, bandwidth_bytes_per_s=rate, round_trip_s=time_s)


def all_links(hosts: str, slow: Collection[str] = ()) -> list[HostLink]:
    """All ways; those to and from the slow hosts are slow."""
    return [
        link(a, b, SLOW if a in slow or b in slow else FAST) for a in hosts for b in hosts if a != b
    ]


@pytest.mark.parametrize("count", range(1, 10))
def test_every_pair_meets_once_and_nobody_twice_at_a_time(count: int) -> None:
    hosts = [f"h{n}" for n in range(count)]
    found = rounds(hosts)
    for pairs in found:
        names = [name for pair in pairs for name in pair]
        assert len(names) == len(set(names))
    met = sorted(tuple(sorted(pair)) for pairs in found for pair in pairs)
    assert met == sorted(combinations(sorted(hosts), 2))
    assert len([pairs for pairs in found if pairs]) == (count - 1 + count % 2 if count > 1 else 0)


def test_many_hosts_are_measured_briefly() -> None:
    assert measuring_s(2) == 0.5
    assert 0.15 <= measuring_s(64) < measuring_s(12) < 0.5


@pytest.mark.parametrize("hosts", ["abc", "abcd", "abcdefgh"])
def test_one_slow_host_is_named(hosts: str) -> None:
    slow = slow_links(all_links(hosts, "b"))
    assert {frozenset((s.link.source, s.link.target)) for s in slow} == {
        frozenset(("b", other)) for other in hosts if other != "b"
    }
    assert all(s.share == pytest.approx(SLOW / FAST) and s.times is None for s in slow)
    assert slow_hosts(slow, list(hosts)) == ["b"]


def test_two_slow_hosts_are_named() -> None:
    assert slow_hosts(slow_links(all_links("abcdef", "be")), list("abcdef")) == ["b", "e"]


def test_a_slow_host_is_named_although_another_way_is_slow_too() -> None:
    links = [k for k in all_links("abcd", "b") if (k.source, k.target) != ("c", "d")]
    found = slow_links([*links, link("c", "d", SLOW)])
    assert slow_hosts(found, list("abcd")) == ["b"]


def test_a_slow_way_is_nobodys_alone() -> None:
    links = [k for k in all_links("abcd") if {k.source, k.target} != {"a", "b"}]
    slow = slow_links([*links, link("a", "b", SLOW), link("b", "a")])
    assert [(s.link.source, s.link.target) for s in slow] == [("a", "b")]
    assert slow_hosts(slow, list("abcd")) == []


def test_of_two_hosts_one_direction_may_be_slow() -> None:
    slow = slow_links([link("a", "b", SLOW), link("b", "a")])
    assert [s.link.source for s in slow] == ["a"]
    assert slow_hosts(slow, ["a", "b"]) == []


@pytest.mark.parametrize("rates", [(FAST, FAST), (SLOW, SLOW), (FAST, 0.6 * FAST), (8e9, 2e9)])
def test_what_is_alike_is_not_slow(rates: Sequence[float]) -> None:
    """The last two: within a factor of two, and faster than can be measured."""
    assert slow_links([link("a", "b", rates[0]), link("b", "a", rates[1])]) == []


def test_a_long_round_trip_is_found_unless_it_is_short_all_the_same() -> None:
    def ways(far_s: float) -> list[HostLink]:
        near = [k for k in all_links("abc") if "c" not in (k.source, k.target)]
        return [*near, *(link(a, b, FAST, far_s) for a, b in ("ac", "ca", "bc", "cb"))]

    far = slow_links(ways(0.01))
    assert [s.times for s in far] == [pytest.approx(100.0)] * 4
    assert {s.share for s in far} == {None}
    assert slow_hosts(far, list("abc")) == ["c"]
    assert slow_links(ways(0.00035)) == []


def test_several_streams_may_be_what_a_way_can() -> None:
    one = HostLink(source="a", target="b", bandwidth_bytes_per_s=SLOW, several_bytes_per_s=FAST)
    assert slow_links([one, link("b", "a")]) == []
    assert one.best_bytes_per_s == FAST


def test_what_could_not_be_measured_is_neither_slow_nor_usual() -> None:
    broken = HostLink(source="a", target="b", problem="no answer")
    assert slow_links([broken, link("b", "a")]) == []
    assert slow_links([broken]) == []
    assert slowest([broken]) is None
    assert slowest([broken, link("a", "b", FAST), link("b", "a", SLOW)]) == link("b", "a", SLOW)


def test_a_link_as_json() -> None:
    assert link("a", "b", 1e6, 0.002).to_json() == {
        "from": "a",
        "to": "b",
        "bandwidth_bytes_per_s": 1e6,
        "several_bytes_per_s": None,
        "round_trip_s": 0.002,
        "problem": "",
    }
