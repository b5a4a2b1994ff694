"""What has to be the same on all hosts."""

from collections.abc import Mapping

import pytest

from paceline.doctor.checks.same import (
    check_clocks,
    check_data,
    check_files,
    check_launcher,
    check_processors,
    check_versions,
)
from paceline.doctor.facts import Contact, HostFacts, MachineFacts, SoftwareFacts

GOOD = {"Paceline": "1.0", "torch": "2.15.0", "Python": "3.11.7", "driver": "580.1"}


def hosts(**changes: Mapping[str, str]) -> dict[str, HostFacts]:
    return {
        name: HostFacts(software=SoftwareFacts(versions={**GOOD, **changes.get(name, {})}))
        for name in ("a", "b", "c")
    }


def test_the_same_versions() -> None:
    found = list(check_versions(hosts()))
    assert {(f.state, f.text) for f in found} == {
        ("ok", "Paceline 1.0, torch 2.15.0, Python 3.11.7")
    }


@pytest.mark.parametrize(
    ("name", "state"), [("torch", "fault"), ("Python", "fault"), ("driver", "warning")]
)
def test_an_odd_version_is_named_with_both(name: str, state: str) -> None:
    found = [f for f in check_versions(hosts(a={name: "0.0"})) if f.state != "ok"]
    assert [(f.hosts, f.state) for f in found] == [(("a",), state)]
    assert f"{name} 0.0, and {GOOD[name]} on the others" in found[0].text


def test_a_version_that_only_one_has() -> None:
    (found,) = [f for f in check_versions(hosts(b={"NCCL": "2.30"})) if f.state != "ok"]
    assert found.hosts == ("b",)
    assert "NCCL 2.30, and none on the others" in found.text


def test_another_version_than_the_launchers() -> None:
    (found,) = check_launcher({"a": "1.0", "b": "0.9"}, "1.0")
    assert (found.hosts, found.state) == (("b",), "fault")
    assert "Paceline 0.9 is installed there, and 1.0 here" in found.text


def test_a_torch_that_cannot_be_imported() -> None:
    facts = hosts() | {"c": HostFacts(software=SoftwareFacts(torch_problem="ImportError: libx"))}
    found = [f for f in check_versions(facts) if "libx" in f.text]
    assert [(f.hosts, f.state) for f in found] == [(("c",), "fault")]


def test_processors() -> None:
    def of(name: str) -> HostFacts:
        return HostFacts(machine=MachineFacts(processor=name, capability="AVX512"))

    found = list(check_processors({"a": of("EPYC"), "b": of("Xeon"), "c": of("EPYC")}))
    assert [(f.hosts[0], f.state) for f in found] == [("a", "ok"), ("b", "warning"), ("c", "ok")]
    assert "Xeon (AVX512), and EPYC (AVX512) on the others" in found[1].text


def ahead(seconds: float) -> Contact:
    return Contact(clock_ahead_s=seconds, clock_error_s=0.01)


def test_clocks_near_enough() -> None:
    found = list(check_clocks({("a", "b"): ahead(1.5), ("a", "c"): ahead(-1.5)}, ["a", "b", "c"]))
    assert [(f.hosts, f.state) for f in found] == [(("a", "b", "c"), "ok")]


@pytest.mark.parametrize(
    ("seconds", "words"), [(60.0, "60 s ahead of a's"), (-60.0, "60 s behind a's")]
)
def test_a_clock_that_is_off(seconds: float, words: str) -> None:
    contacts = {("a", "b"): ahead(0.0), ("a", "c"): ahead(seconds)}
    (found,) = check_clocks(contacts, ["a", "b", "c"])
    assert (found.hosts, found.state) == (("c",), "warning")
    assert words in found.text


def test_a_clock_is_compared_the_other_way_round_where_need_be() -> None:
    (found,) = check_clocks({("a", "b"): Contact(), ("b", "a"): ahead(-60.0)}, ["a", "b"])
    assert "60 s ahead of a's" in found.text


@pytest.mark.parametrize(
    ("seen", "states", "words"),
    [
        ({"b": True, "c": True}, ["ok"], "is shared"),
        ({"b": False, "c": False}, ["ok"], "each host's own"),
        ({"b": True, "c": False}, ["warning"], "not by c"),
    ],
)
def test_shared_files(seen: dict[str, bool], states: list[str], words: str) -> None:
    found = list(check_files("a", "/runs", seen))
    assert [f.state for f in found] == states
    assert words in found[0].text


def test_data() -> None:
    same, other = {"training": "X of 3 samples, 1"}, {"training": "X of 3 samples, 2"}
    found = list(check_data({"a": same, "b": other, "c": same}, {"d": "there is no file x"}))
    assert [(f.hosts[0], f.state) for f in found] == [
        ("d", "fault"),
        ("a", "ok"),
        ("b", "fault"),
        ("c", "ok"),
    ]
    assert "X of 3 samples, 2, and X of 3 samples, 1 on the others" in found[2].text
