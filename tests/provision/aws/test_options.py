"""Options of `paceline aws`: what is refused before AWS is asked."""

import pytest

from paceline.errors import UsageError
from paceline.provision.aws.options import (
    ClusterPlace,
    NetworkOptions,
    NodeOptions,
    read_network,
    split_bucket,
    split_ports,
)


@pytest.mark.parametrize("name", ["paceline", "a", "Train-2", "x" * 40])
def test_names_that_a_stack_can_have(name: str) -> None:
    assert ClusterPlace(name=name).name == name


@pytest.mark.parametrize("name", ["", "2x", "-x", "a_b", "a b", "../x", "x" * 41, "a\n"])
def test_names_that_a_stack_cannot_have(name: str) -> None:
    with pytest.raises(UsageError, match="stack's name"):
        ClusterPlace(name=name)


@pytest.mark.parametrize(
    ("option", "value", "what"),
    [
        ("nodes", 0, "--nodes is 0"),
        ("nodes", 65, "from 1 to 64"),
        ("max_hours", 0.0, "--max-hours"),
        ("max_hours", float("nan"), "--max-hours"),
        ("max_hours", float("inf"), "--max-hours"),
        ("disk_gb", 1, "--disk-gb"),
        ("login", "root;id", "--login"),
        ("node_python", "python", "--node-python"),
        ("bucket", "*", "--bucket"),
        ("bucket", "data/*", "--bucket"),
        ("bucket", "data/${aws:username}", "--bucket"),
    ],
)
def test_nodes_that_cannot_be(option: str, value: object, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        NodeOptions(**{option: value})  # type: ignore[arg-type]


def test_buckets_are_split() -> None:
    assert split_bucket("data") == ("data", "")
    assert split_bucket("s3://data/stl10/") == ("data", "stl10")


@pytest.mark.parametrize(
    "text", ["29500", "30000-20000", "80-9000", "20000-20099", "a-b", "1-70000"]
)
def test_ranges_of_ports_that_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--port-range"):
        split_ports(text)


def test_networks_that_may_log_in() -> None:
    assert read_network("192.0.2.7") == "192.0.2.7/32"
    assert read_network("192.0.2.9/24") == "192.0.2.0/24"


@pytest.mark.parametrize("text", ["0.0.0.0/0", "0.0.0.0/1", "128.0.0.0/7"])
def test_the_world_may_not(text: str) -> None:
    with pytest.raises(UsageError, match="the world"):
        read_network(text)


@pytest.mark.parametrize("text", ["", "me", "::/0", "192.0.2.300", "192.0.2.0/33"])
def test_what_is_no_network(text: str) -> None:
    with pytest.raises(UsageError, match="no IPv4 address"):
        NetworkOptions(allow_ssh_from=text)


def test_contradictions() -> None:
    with pytest.raises(UsageError, match="give one"):
        NetworkOptions(ssh_key="mine", public_key="mine.pub")
    with pytest.raises(UsageError, match="leave out --zone"):
        NetworkOptions(subnet="subnet-1", zone="us-east-1a")
