"""Facts go through JSON and come back the same."""

import json
from dataclasses import asdict

import pytest

from paceline.doctor.facts import Contact, GpuFacts, HostFacts, Interface, NetworkFacts
from paceline.doctor.probes.storage import DataRequest
from paceline.options.fields import read_dataclass

FULL = HostFacts(
    network=NetworkFacts(
        hostname="a", interfaces=(Interface(name="eth0", addresses=("10.0.0.1", "fd00::1")),)
    ),
    gpus=GpuFacts(kind="cuda", names=("A", "B"), memory_bytes=(1, 2)),
    unknown={"disk": "OSError"},
)


@pytest.mark.parametrize("facts", [FULL, HostFacts()])
def test_there_and_back(facts: HostFacts) -> None:
    assert read_dataclass(HostFacts, json.loads(json.dumps(asdict(facts)))) == facts


def test_any_option_comes_back_as_it_was() -> None:
    asked = DataRequest(
        reference="x:y", arguments={"a": 1, "b": "1", "c": (1, 2.5), "d": None, "e": True}
    )
    assert read_dataclass(DataRequest, json.loads(json.dumps(asdict(asked)))) == asked


def test_another_version_may_say_more_or_less() -> None:
    found = read_dataclass(
        HostFacts, {"network": {"hostname": "a", "colour": "red"}, "weather": "fine"}
    )
    assert found == HostFacts(network=NetworkFacts(hostname="a"))


@pytest.mark.parametrize(
    "content", [None, [], {"open_ports": "1"}, {"open_ports": ["1"]}, {"clock_ahead_s": "now"}]
)
def test_what_is_of_another_type_is_refused(content: object) -> None:
    with pytest.raises(ValueError, match=r"is |should be"):
        read_dataclass(Contact, content)
