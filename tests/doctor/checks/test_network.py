"""Names, addresses, ports and packets."""

import pytest

from paceline.doctor.checks.network import (
    Meanings,
    check_address,
    check_addresses,
    check_congestion,
    check_meanings,
    check_mtu,
    check_name,
    check_packets,
    check_ports,
)
from paceline.doctor.facts import (
    AddressChoice,
    Contact,
    HostFacts,
    Interface,
    NetworkFacts,
    choose_address,
    meanings_of,
)

LO = Interface(name="lo", addresses=("127.0.0.1",), mtu=65536)
ETH0 = Interface(name="eth0", addresses=("10.0.0.5", "fd00::5"), mtu=1500)
ETH1 = Interface(name="eth1", addresses=("192.168.1.5",), mtu=9001)
TWO = NetworkFacts(
    hostname="a",
    hostname_means="10.0.0.5",
    default_address="192.168.1.5",
    ssh_address="10.0.0.5",
    interfaces=(ETH0, ETH1, LO),
)
RANGE = (32768, 60999)


@pytest.mark.parametrize(
    ("given", "meanings", "interface", "address", "by"),
    [
        ("192.168.1.5", ["10.0.0.5"], None, "192.168.1.5", "the hostfile"),
        ("10.9.9.9", ["192.168.1.5"], None, "192.168.1.5", "name"),
        (None, ["127.0.1.1", "192.168.1.5"], None, "192.168.1.5", "name"),
        (None, [None, "54.1.1.1"], None, "10.0.0.5", "ssh"),
        ("10.0.0.5", [], "eth1", "192.168.1.5", "--interface eth1"),
        (None, [], "ib0", "", "--interface ib0"),
    ],
)
def test_an_address_is_chosen(
    given: str | None, meanings: list[str | None], interface: str | None, address: str, by: str
) -> None:
    found = choose_address(TWO, given, meanings, interface)
    assert (found.address, found.chosen_by) == (address, by)
    if address:
        assert found.interface is not None
        assert address in found.interface.addresses


def test_the_default_route_and_then_any_address_will_do() -> None:
    alone = NetworkFacts(default_address="192.168.1.5", interfaces=(LO, ETH0, ETH1))
    assert choose_address(alone, None, [], None).chosen_by == "default route"
    cut_off = NetworkFacts(default_address="127.0.0.1", interfaces=(LO, ETH0))
    assert choose_address(cut_off, None, [], None).address == "10.0.0.5"
    assert choose_address(NetworkFacts(interfaces=(LO,)), None, [], None).address == ""


def test_what_a_host_says_of_its_own_name_does_not_count() -> None:
    told: Meanings = {"a": {"a": "127.0.1.1"}, "b": {"a": "10.0.0.5"}, "c": {"a": None}}
    assert meanings_of("a", told, "a") == ["10.0.0.5", None]


@pytest.mark.parametrize(
    ("means", "state", "words"),
    [
        ("10.0.0.5", "ok", ""),
        (None, "warning", "no address"),
        ("127.0.1.1", "warning", "127.0.1.1"),
    ],
)
def test_a_hosts_own_name(means: str | None, state: str, words: str) -> None:
    facts = HostFacts(network=NetworkFacts(hostname="a", hostname_means=means))
    (found,) = check_name("a", facts)
    assert found.state == state
    assert words in found.text


def test_names_on_other_hosts() -> None:
    own = {"a": {"10.0.0.5", "127.0.0.1"}, "b": {"10.0.0.6", "127.0.0.1"}, "c": {"10.0.0.7"}}
    told: Meanings = {
        "a": {"a": "127.0.1.1", "b": "10.0.0.6", "c": "10.0.0.9"},
        "b": {"a": "127.0.0.1", "b": "10.0.0.6", "c": "10.0.0.7"},
        "c": {"a": "10.0.0.5", "b": None, "c": "10.0.0.7"},
    }
    found = [(f.hosts[0], f.text) for f in check_meanings(["a", "b", "c"], told, own)]
    assert [host for host, _ in found] == ["a", "b", "c"]
    assert "b: it stands for 127.0.0.1 there, which is loopback" in found[0][1]
    assert "c: its name isn't known there" in found[1][1]
    assert "a: it stands for 10.0.0.9 there, none of its addresses" in found[2][1]


def test_a_name_of_ssh_alone_is_no_trouble() -> None:
    told: Meanings = {host: dict.fromkeys("abc") for host in "abc"}
    found = list(check_meanings(["a", "b", "c"], told, {host: set() for host in "abc"}))
    assert [(f.hosts, f.state) for f in found] == [((host,), "ok") for host in "abc"]


def test_addresses_are_told_in_one_line() -> None:
    choices = {
        "a": AddressChoice(address="10.0.0.5", chosen_by="ssh", interface=ETH0),
        "b": AddressChoice(address="10.0.0.6", chosen_by="ssh", interface=ETH0),
        "c": AddressChoice(address="", chosen_by="nothing", interface=None),
    }
    (found,) = check_addresses(choices)
    assert found.text == "by ssh: a 10.0.0.5 on eth0, b 10.0.0.6 on eth0"
    (lost,) = check_address("c", choices["c"], HostFacts(network=TWO), None)
    assert lost.state == "fault"
    (other,) = check_address("a", choices["a"], HostFacts(network=TWO), "10.9.9.9")
    assert other.state == "warning"
    assert "10.9.9.9" in other.text


OPEN = Contact(open_ports=(40000, 32768, 60999), source="10.0.0.5")
HALF = Contact(open_ports=(40000, 32768), closed_ports=(60999,), problem="no answer")
SHUT = Contact(closed_ports=(40000, 32768, 60999), problem="Connection refused")
ADDRESSES = {"a": "10.0.0.5", "b": "10.0.0.6", "c": "10.0.0.7"}


def judged(contacts: dict[tuple[str, str], Contact]) -> list[tuple[tuple[str, ...], str, str]]:
    ranges = dict.fromkeys("abc", RANGE)
    found = check_ports(contacts, ADDRESSES, ranges)
    return [(f.hosts, f.state, f.text) for f in found]


def test_open_ports() -> None:
    contacts = {("a", "b"): OPEN, ("b", "a"): Contact(open_ports=(1,), source="10.0.0.6")}
    assert judged(contacts) == [(("a", "b"), "ok", "open both ways everywhere")]


def test_one_closed_way() -> None:
    ((hosts, state, text),) = judged({("a", "b"): SHUT, ("b", "a"): OPEN, ("c", "b"): HALF})[:1]
    assert (hosts, state) == (("a", "b"), "fault")
    assert "a can't reach b at 10.0.0.6, ports 40000, 32768, 60999: Connection refused" in text


def test_a_host_that_nobody_reaches_is_told_once() -> None:
    found = judged({("a", "c"): SHUT, ("b", "c"): SHUT, ("a", "b"): Contact(open_ports=(1,))})
    assert [(hosts, state) for hosts, state, _ in found] == [(("c",), "fault")]
    assert "none of the others reaches c" in found[0][2]


def test_ports_of_which_some_are_closed() -> None:
    found = judged({("a", "c"): HALF, ("b", "c"): HALF})
    assert [(hosts, state) for hosts, state, _ in found] == [(("a", "b", "c"), "fault")]
    assert "a and b can reach c at ports 40000, 32768 but not at port 60999" in found[0][2]
    assert "32768-60999" in found[0][2]


def test_a_host_that_goes_another_way() -> None:
    found = judged({("a", "b"): Contact(open_ports=(1,), source="192.168.1.5")})
    assert [state for _, state, _ in found] == ["warning", "ok"]
    assert "from 192.168.1.5, not from 10.0.0.5" in found[0][2]


def test_the_congestion_control_of_each_host_is_told() -> None:
    names = {"a": "bbr", "b": "cubic", "c": "", "d": "bbr"}
    facts = {h: HostFacts(network=NetworkFacts(congestion=name)) for h, name in names.items()}
    found = list(check_congestion(facts))
    assert [(f.hosts[0], f.state) for f in found] == [("a", "ok"), ("b", "ok"), ("d", "ok")]
    assert found[0].text.startswith("congestion control bbr. Where several hosts send to one")
    assert "net.ipv4.tcp_congestion_control=cubic" in found[0].text
    assert found[1].text == "congestion control cubic"
    (alone,) = check_congestion({"a": facts["a"]})  # it sends nothing to others
    assert (alone.state, alone.text) == ("ok", "congestion control bbr")


def test_interfaces_of_different_mtu() -> None:
    big = AddressChoice(address="x", chosen_by="ssh", interface=ETH1)
    small = AddressChoice(address="x", chosen_by="ssh", interface=ETH0)
    found = list(check_mtu({"a": big, "b": small, "c": big}))
    assert [(f.hosts[0], f.state) for f in found] == [("a", "ok"), ("b", "warning"), ("c", "ok")]
    assert "1500" in found[1].text
    assert "9001" in found[1].text


def test_packets_that_vanish() -> None:
    contacts = {
        ("a", "b"): Contact(largest_packet=1500),
        ("b", "a"): Contact(largest_packet=None),
        ("a", "c"): Contact(largest_packet=1450),
        ("b", "c"): Contact(largest_packet=1450),
    }
    (found,) = check_packets(contacts, dict.fromkeys("abc", 1500))
    assert (found.hosts, found.state) == (("a", "b", "c"), "warning")
    assert "1500 bytes from a and b don't reach c, only those of 1450 do" in found.text
