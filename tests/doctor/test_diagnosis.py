"""The examination with scripted probes: who is asked what, and who is left out when."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import final

import pytest

from paceline.doctor.diagnosis import Diagnosis, DiagnosisRequest, Examination
from paceline.doctor.facts import (
    Contact,
    DiskFacts,
    HostFacts,
    Interface,
    LimitFacts,
    MachineFacts,
    NetworkFacts,
    SoftwareFacts,
)
from paceline.doctor.host_pool import HostPool, PooledHost
from paceline.doctor.probe import Answer, Question
from paceline.errors import ExitCode, InfrastructureError

NAMES = ("a", "b", "c")
RATE = 100e6
Script = Callable[[str, Question], Answer | None]
"""A host's name and a question: its answer; None: the usual one."""


@final
class ScriptedProbe:
    """A probe that isn't there."""

    def __init__(self, host: str, script: Script) -> None:
        self._host = host
        self._script = script
        self._answers: list[dict[str, object]] = []
        self.asked: list[Question] = []

    def send(self, message: Question) -> None:
        self.asked.append(message)
        found = self._script(self._host, message)
        answer = usual(self._host, message) if found is None else found
        said = {"number": message["number"], **answer}
        self._answers.append(json.loads(json.dumps(said)))

    def messages(self, timeout_s: float) -> Iterator[dict[str, object]]:
        answer = self._answers.pop(0)
        if "silent" in answer:
            raise InfrastructureError("no answer in 2 s")
        yield answer


def facts_of(host: str) -> HostFacts:
    address = f"10.0.0.{NAMES.index(host)}"
    eth0 = Interface(name="eth0", addresses=(address,), mtu=1500)
    return HostFacts(
        network=NetworkFacts(hostname=host, hostname_means=address, interfaces=(eth0,)),
        software=SoftwareFacts(versions={"Paceline": "1", "torch": "2", "Python": "3"}),
        machine=MachineFacts(cores=4, memory_bytes=10**11, available_bytes=10**11),
        limits=LimitFacts(shared_memory_bytes=10**10),
        disk=DiskFacts(directory="/runs", free_bytes=10**12, total_bytes=10**12),
    )


def contact_of(host: str) -> Contact:
    source = f"10.0.0.{NAMES.index(host)}"
    return Contact(open_ports=(1, 2, 3), source=source, clock_ahead_s=0.0, largest_packet=1500)


def usual(host: str, question: Question) -> Answer:
    """What the probe of a good host says."""
    asked = question["ask"]
    if asked == "contacts":
        peers = question["peers"]
        assert isinstance(peers, list)
        return {"answer": {peer["name"]: asdict(contact_of(host)) for peer in peers}}
    if asked == "measure":
        peer = question["peer"]
        assert isinstance(peer, dict)
        rates = {"bandwidth_bytes_per_s": RATE, "round_trip_s": 1e-4}
        return {"answer": {"source": host, "target": peer["name"], **rates}}
    answers: Mapping[object, object] = {
        "facts": asdict(facts_of(host)),
        "names": {name: f"10.0.0.{NAMES.index(name)}" for name in NAMES},
        "listen": {"ports": [1, 2, 3], "datagram_port": 4},
        "store": {"port": 5},
        "all_reduce": {"seconds": 0.5, "is_right": True},
        "mark": {"path": "/runs/.mark", "text": "x"},
        "see": {"sees": True},
        "data": {"training": "X of 3 samples, 1"},
    }
    return {"answer": answers.get(asked, {})}


def examined(
    script: Script = lambda host, question: None, wish: DiagnosisRequest | None = None
) -> tuple[Diagnosis, dict[str, list[Question]]]:
    probes = {name: ScriptedProbe(name, script) for name in NAMES}
    pool = HostPool([PooledHost(name=name, probe=probe) for name, probe in probes.items()])
    found = Examination(pool, wish or DiagnosisRequest(), lambda text: None).run()
    return found, {name: probe.asked for name, probe in probes.items()}


def bad(found: Diagnosis) -> list[tuple[tuple[str, ...], str, str]]:
    return [(f.hosts, f.what, f.state) for f in found.findings if f.state != "ok"]


def asks(questions: list[Question]) -> list[object]:
    return [question["ask"] for question in questions]


def test_good_hosts() -> None:
    found, asked = examined(wish=DiagnosisRequest(recipe={"reference": "x:y"}))
    assert bad(found) == []
    assert found.exit_code == ExitCode.DONE
    assert [(k.source, k.target) for k in found.links] == [
        (a, b) for a in NAMES for b in NAMES if a != b
    ]
    assert found.all_reduce is not None
    assert found.all_reduce.is_right
    assert found.addresses == {"a": "10.0.0.0", "b": "10.0.0.1", "c": "10.0.0.2"}
    assert asks(asked["a"]).count("measure") == 2
    assert asks(asked["a"]).index("close") < asks(asked["a"]).index("all_reduce")
    assert [asks(asked[n])[-2:] for n in NAMES] == [["unmark", "data"]] + [["see", "data"]] * 2
    ranks = [q["rank"] for n in NAMES for q in asked[n] if q["ask"] == "all_reduce"]
    assert ranks == [0, 1, 2]


@pytest.mark.parametrize("phase", ["facts", "names", "listen", "contacts", "measure", "see"])
def test_a_host_that_falls_silent_is_left_out_from_then_on(phase: str) -> None:
    def script(host: str, question: Question) -> Answer | None:
        return {"silent": True} if host == "b" and question["ask"] == phase else None

    found, asked = examined(script)
    assert (("b",), "examination", "fault") in bad(found)
    assert asks(asked["b"])[-1] == phase
    assert found.exit_code == ExitCode.JOB
    assert ("a", "c") in {(k.source, k.target) for k in found.links}
    assert asks(asked["c"])[-1] == "see"


@pytest.mark.parametrize("phase", ["listen", "store", "mark", "data"])
def test_what_a_host_cannot_do_is_a_fault_of_it(phase: str) -> None:
    def script(host: str, question: Question) -> Answer | None:
        return {"problem": "it broke"} if host == "a" and question["ask"] == phase else None

    found, _ = examined(script, DiagnosisRequest(recipe={"reference": "x:y"}))
    (fault,) = (f for f in found.findings if f.state == "fault")
    assert "it broke" in fault.text
    assert "a" in fault.hosts


def test_closed_ways_are_neither_measured_nor_used() -> None:
    def script(host: str, question: Question) -> Answer | None:
        if question["ask"] != "contacts" or host != "a":
            return None
        shut = asdict(Contact(closed_ports=(1, 2, 3), problem="no answer"))
        return {"answer": {"b": shut, "c": asdict(contact_of("a"))}}

    found, asked = examined(script)
    assert (("a", "b"), "ports", "fault") in bad(found)
    assert ("a", "b") not in {(k.source, k.target) for k in found.links}
    assert len(found.links) == 5
    assert "all_reduce" not in asks(asked["a"])
    assert any(what == "all-reduce" and state == "warning" for _, what, state in bad(found))


@pytest.mark.parametrize("odd", NAMES)
def test_a_probe_of_another_version_is_named(odd: str) -> None:
    def script(host: str, question: Question) -> Answer | None:
        return {"answer": {"machine": 7}} if host == odd and question["ask"] == "facts" else None

    found, _ = examined(script)
    (fault,) = (f for f in found.findings if f.state == "fault")
    assert fault.hosts == (odd,)
    assert len(found.links) == 2
    assert "another version" in fault.text


def test_a_wrong_sum_is_a_fault() -> None:
    def script(host: str, question: Question) -> Answer | None:
        if host != "c" or question["ask"] != "all_reduce":
            return None
        return {"answer": {"seconds": 0.1, "is_right": False}}

    found, _ = examined(script)
    assert bad(found) == [(NAMES, "all-reduce", "fault")]


def test_measurements_never_meet() -> None:
    """Of the hosts that are asked at the same time, none is another's target."""
    order: list[tuple[object, str, str]] = []

    def script(host: str, question: Question) -> Answer | None:
        if question["ask"] == "measure":
            peer = question["peer"]
            assert isinstance(peer, dict)
            order.append((question["number"], host, str(peer["name"])))
        return None

    examined(script)
    for number in {number for number, _, _ in order}:
        names = [name for n, *pair in order if n == number for name in pair]
        assert len(names) == len(set(names))
    assert len(order) == 6
