"""Options of `paceline aws`: what is refused before AWS is called."""

import pytest

from paceline.errors import UsageError
from paceline.provision.aws.options import (
    ClusterOptions,
    NetworkOptions,
    NodeOptions,
    read_network,
)


@pytest.mark.parametrize("name", ["", "2x", "a_b", "../x", "x" * 41, "a\n"])
def test_names_that_a_stack_cannot_have(name: str) -> None:
    with pytest.raises(UsageError):
        ClusterOptions(name=name)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("nodes", 0),
        ("max_hours", float("nan")),
        ("disk_gb", 1),
        ("login", "root;id"),
        ("node_python", "python"),
    ],
)
def test_nodes_that_cannot_be(option: str, value: object) -> None:
    with pytest.raises(UsageError, match="--" + option.replace("_", "-")):
        NodeOptions(**{option: value})  # type: ignore[arg-type]


def test_networks_that_may_log_in() -> None:
    assert read_network("192.0.2.7") == "192.0.2.7/32"
    assert read_network("192.0.2.9/24") == "192.0.2.0/24"
    for text in ("0.0.0.0/0", "128.0.0.0/7", "", "::/0", "192.0.2.300"):
        with pytest.raises(UsageError):
            NetworkOptions(allow_ssh_from=text)
    with pytest.raises(UsageError):
        NetworkOptions(subnet="subnet-1", zone="us-east-1a")
