"""What is printed: grouped, folded, at most 80 columns wide."""

import json

import pytest

from paceline.doctor.check_result import CheckResult, fault, folded, ok, warning
from paceline.doctor.checks.speed import AllReduce
from paceline.doctor.diagnosis import Diagnosis, as_json
from paceline.doctor.facts import HostFacts
from paceline.doctor.text_report import as_text
from paceline.errors import ExitCode
from tests.doctor.test_bandwidth import all_links

HOSTS = ("a", "b", "c")
FINE = tuple(ok(host, "versions", "torch 2.15.0") for host in HOSTS)


def test_the_same_of_all_is_one_line() -> None:
    shown = as_text(Diagnosis(hosts=HOSTS, findings=FINE))
    assert shown == "3 hosts\n  ok       versions       torch 2.15.0 on 3 hosts\n\nAll is well."


def test_one_host_has_no_heading_of_hosts() -> None:
    shown = as_text(Diagnosis(hosts=("a",), findings=FINE[:1])).splitlines()
    assert shown[:2] == ["a", "  ok       versions       torch 2.15.0"]


def test_findings_stand_with_whom_they_concern() -> None:
    findings = (
        *FINE[:2],
        fault("c", "versions", "torch 2.1, and 2.15.0 on the others"),
        ok("c", "disk", "room"),
        warning("a", "load", "busy"),
        warning("c", "load", "busy"),
        CheckResult(hosts=("b", "c"), what="ports", state="fault", text="b can't reach c"),
        CheckResult(hosts=HOSTS, what="bandwidth", state="ok", text="the slowest link"),
    )
    text = as_text(Diagnosis(hosts=HOSTS, findings=findings, facts={"a": HostFacts()}))
    assert text.splitlines() == [
        "3 hosts",
        "  ok       versions       torch 2.15.0 on a, b",
        "  ok       bandwidth      the slowest link",
        "",
        "c",
        "  fault    versions       torch 2.1, and 2.15.0 on the others",
        "  ok       disk           room",
        "",
        "several hosts",
        "  fault    ports          b can't reach c",
        "  warning  load           busy (a, c)",
        "",
        "2 faults, 1 warning. Fix these and rerun `paceline doctor`.",
    ]


@pytest.mark.parametrize("names", ["abc", "abcdefgh", "abcdefghijk"])
@pytest.mark.parametrize("suffix", ["", ".a-long-domain.example"])
def test_nothing_is_wider_than_a_terminal(names: str, suffix: str) -> None:
    links = [
        type(k)(
            source=k.source + suffix,
            target=k.target + suffix,
            bandwidth_bytes_per_s=k.bandwidth_bytes_per_s,
            round_trip_s=k.round_trip_s,
        )
        for k in all_links(names, "b")
    ]
    hosts = tuple(name + suffix for name in names)
    long = tuple(warning(host, "load", "word " * 60) for host in hosts)
    shown = as_text(Diagnosis(hosts=hosts, findings=long, links=tuple(links)))
    assert max(map(len, shown.splitlines())) <= 80
    assert all(host in shown for host in hosts[:2])
    assert "96*" in shown or "96 Mbit/s*" in shown


def test_a_way_that_was_not_measured_has_a_dash() -> None:
    links = tuple(k for k in all_links("abc") if (k.source, k.target) != ("a", "c"))
    rows = as_text(Diagnosis(hosts=HOSTS, findings=FINE, links=links)).splitlines()
    assert next(row.split() for row in rows if row.startswith("  a ")) == ["a", "-", "880", "-"]


def test_folding_keeps_the_order_and_every_host_once() -> None:
    found = folded([*FINE, FINE[0], fault("a", "disk", "full")])
    assert [(f.hosts, f.what) for f in found] == [(HOSTS, "versions"), (("a",), "disk")]


@pytest.mark.parametrize(
    ("findings", "unreachable", "code"),
    [
        (FINE, (), ExitCode.DONE),
        ((warning("a", "load", "busy"),), (), ExitCode.DONE),
        ((fault("a", "disk", "full"),), (), ExitCode.JOB),
        ((fault("a", "ssh", "no answer"),), ("a",), ExitCode.INFRASTRUCTURE),
    ],
)
def test_exit_codes(
    findings: tuple[CheckResult, ...], unreachable: tuple[str, ...], code: int
) -> None:
    found = Diagnosis(hosts=HOSTS, findings=findings, unreachable=unreachable)
    assert found.exit_code == code


def test_json_holds_all() -> None:
    found = Diagnosis(
        hosts=HOSTS,
        findings=FINE,
        facts={"a": HostFacts()},
        addresses={"a": "10.0.0.1"},
        links=tuple(all_links("ab")),
        all_reduce=AllReduce(hosts=2, backend="gloo", size_bytes=4096, seconds=0.1, is_right=True),
        unreachable=("c",),
    )
    content = json.loads(json.dumps(as_json(found)))
    assert content.keys() == {"findings", "hosts", "links", "all_reduce"}
    assert content["findings"][0] == {
        "hosts": ["a"],
        "what": "versions",
        "state": "ok",
        "text": "torch 2.15.0",
    }
    assert [host["reachable"] for host in content["hosts"]] == [True, True, False]
    assert content["hosts"][0]["address"] == "10.0.0.1"
    assert content["hosts"][0]["machine"]["cores"] == 1
    assert content["links"][0]["from"] == "a"
    assert content["all_reduce"]["bus_bytes_per_s"] == 40960
