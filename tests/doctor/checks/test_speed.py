"""Ways between hosts, and the all-reduce over them."""

import pytest

from paceline.doctor.bandwidth import HostLink
from paceline.doctor.checks.speed import (
    AllReduce,
    check_all_reduce,
    check_links,
    size_to_reduce,
)
from paceline.doctor.facts import AddressChoice, Interface
from tests.doctor.test_bandwidth import FAST, SLOW, all_links, link

HOSTS = ["a", "b", "c", "d"]


def judged(
    links: list[HostLink], hosts: list[str] = HOSTS
) -> list[tuple[tuple[str, ...], str, str]]:
    return [(f.hosts, f.what, f.state) for f in check_links(links, hosts, {})]


def test_good_links() -> None:
    assert judged(all_links("abcd")) == [(("a", "b", "c", "d"), "bandwidth", "ok")]


def test_a_slow_host_is_one_line() -> None:
    found = list(check_links(all_links("abcd", "c"), HOSTS, {}))
    assert (found[0].hosts, found[0].what, found[0].state) == (("c",), "links", "warning")
    assert "96 Mbit/s" in found[0].text
    assert found[1].what == "bandwidth"
    assert found[1].state == "warning"  # less than a gigabit
    assert "a to c, 96 Mbit/s: gradients of 100 MB need 12.5 s" in found[1].text
    assert len(found) == 2


def test_a_slow_way_is_named() -> None:
    links = [k for k in all_links("abcd") if (k.source, k.target) != ("a", "b")]
    (found, _) = check_links([*links, link("a", "b", SLOW)], HOSTS, {})
    assert found.hosts == ("a", "b")
    assert "a to b is slow (96 Mbit/s, 11 % of what is usual)" in found.text


def test_many_slow_ways_are_told_together() -> None:
    """Two racks: fast within, slow between."""
    racks = [{"a", "b"}, {"c", "d"}]
    pairs = [(x, y) for x in "abcd" for y in "abcd" if x != y]
    links = [link(x, y, FAST if {x, y} in racks else SLOW) for x, y in pairs]
    found = judged(links)
    assert found[0] == (("a", "c", "d", "b"), "links", "warning")
    assert len(found) == 2


@pytest.mark.parametrize(
    ("problem", "what"),
    [
        ("nothing went through any more after 78,192 bytes", "packets"),
        ("too little arrived to measure", "packets"),
        ("no answer", "links"),
    ],
)
def test_ways_that_break(problem: str, what: str) -> None:
    broken = HostLink(source="a", target="b", problem=problem)
    found = judged([broken, link("b", "a")], ["a", "b"])
    assert found[0] == (("a", "b"), what, "fault")


def test_an_interface_that_says_more_than_it_does() -> None:
    fast = Interface(name="eth0", addresses=("10.0.0.1",), speed_bytes_per_s=1.25e9)
    choices = {"a": AddressChoice(address="10.0.0.1", chosen_by="ssh", interface=fast)}
    found = list(check_links([link("a", "b"), link("b", "a")], ["a", "b"], choices))
    assert [(f.hosts, f.state) for f in found[1:]] == [(("a",), "warning")]
    assert "says 10 Gbit/s, and it sends 880 Mbit/s" in found[1].text


def reduced(seconds: float | None = 0.1, is_right: bool = True, backend: str = "gloo") -> AllReduce:
    return AllReduce(
        hosts=4,
        backend=backend,
        size_bytes=6_000_000,
        seconds=seconds,
        is_right=is_right,
        problem="the others did not come" if seconds is None else "",
    )


def test_bus_bandwidth() -> None:
    assert reduced().bus_bytes_per_s == pytest.approx(2 * 3 / 4 * 6e6 / 0.1)
    assert reduced(None).bus_bytes_per_s is None
    assert reduced().to_json()["bus_bytes_per_s"] == pytest.approx(90e6)


@pytest.mark.parametrize(
    ("found", "state", "words"),
    [
        (reduced(), "ok", "720 Mbit/s"),
        (reduced(1.0), "warning", "less than half of the 880 Mbit/s"),
        (reduced(is_right=False), "fault", "its result is wrong"),
        (reduced(None), "fault", "the others did not come"),
    ],
)
def test_the_all_reduce(found: AllReduce, state: str, words: str) -> None:
    told = check_all_reduce(found, all_links("abcd"), HOSTS)
    assert told.state == state
    assert words in told.text


def test_gloo_is_not_blamed_for_links_that_are_faster_than_itself() -> None:
    links = [link(a, b, 5e9) for a in "ab" for b in "ab" if a != b]
    assert check_all_reduce(reduced(0.05), links, ["a", "b"]).state == "ok"
    assert check_all_reduce(reduced(0.05, backend="nccl"), links, ["a", "b"]).state == "warning"


def test_the_size_follows_the_slowest_way() -> None:
    assert size_to_reduce([link("a", "b", 1e6)]) == 397_312
    assert size_to_reduce([link("a", "b", 1e3)]) == 65_536
    assert size_to_reduce([link("a", "b", 1e12)]) == 32 << 20
    assert size_to_reduce([]) == 65_536
