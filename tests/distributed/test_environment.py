import json
import os
from pathlib import Path

import pytest

from paceline.distributed.environment import (
    INTERFACE_VARIABLES,
    chosen_interface,
    detect_launchers,
    read_environment,
    read_placement,
    store_file,
    use_interface,
    uses_agent_store,
)
from paceline.distributed.options import DistOptions
from paceline.distributed.placement import Placement
from paceline.errors import UsageError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "TORCHELASTIC_RESTART_COUNT": "3",
}


def test_alone() -> None:
    assert read_placement({}) == Placement()
    assert read_placement({"RANK": "1"}).source == "alone"  # somebody else's variable
    assert not detect_launchers({"WORLD_SIZE": "2"}).started


def test_as_torchs_agent_says() -> None:
    expected = Placement(
        rank=5,
        world_size=8,
        local_rank=1,
        local_world_size=4,
        node_rank=1,
        nodes=2,
        attempt=3,
        source="torch",
    )
    assert read_placement(TORCHRUN) == expected


def test_our_own_launchers_attempts_count_first() -> None:
    assert read_placement(TORCHRUN | {"PACELINE_ATTEMPT": "7"}).attempt == 7


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("RANK", "8", "RANK is 8, but WORLD_SIZE is 8"),
        ("RANK", "-1", "RANK is -1"),
        ("LOCAL_RANK", "4", "LOCAL_RANK is 4, but LOCAL_WORLD_SIZE is 4"),
        ("WORLD_SIZE", "two", "WORLD_SIZE should be a whole number, not 'two'"),
        ("LOCAL_WORLD_SIZE", "0", "LOCAL_WORLD_SIZE is 0"),
    ],
)
def test_variables_that_cant_be_right(name: str, value: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_placement(TORCHRUN | {name: value})


def test_nodes_follow_from_the_sizes_where_they_arent_said() -> None:
    few = {
        name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    }
    assert read_placement(few).nodes == 2


def test_a_place_by_hand_counts_first() -> None:
    options = DistOptions(rank=1, world_size=3, local_rank=1)
    found = read_placement(TORCHRUN | {"MASTER_ADDR": "a", "MASTER_PORT": "7"}, options)
    assert found == Placement(
        rank=1,
        world_size=3,
        local_rank=1,
        local_world_size=2,
        source="options",
        settled=False,
        master_addr="a",
        master_port=7,
    )
    alone = read_placement({}, DistOptions(rank=0, world_size=1))
    assert (alone.settled, alone.on_one_node) == (True, True)


def test_rank_and_world_size_alone_leave_nodes_open() -> None:
    found = read_placement({"RANK": "1", "WORLD_SIZE": "2"})
    assert (found.rank, found.local_rank, found.settled) == (1, 0, False)


def test_the_agents_store() -> None:
    assert uses_agent_store({"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert not uses_agent_store({})


def test_sagemakers_file_stands_for_its_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SM_HOSTS", "SM_CURRENT_HOST"):
        monkeypatch.delenv(name, raising=False)
    resources = tmp_path / "resourceconfig.json"
    assert detect_launchers(read_environment(resources)).node is None
    content = {"current_host": "algo-2", "hosts": ["algo-1", "algo-2"]}
    resources.write_text(json.dumps(content | {"network_interface_name": "eth0"}))
    node = detect_launchers(read_environment(resources)).node
    assert node is not None
    assert (node.node_rank, node.nodes, node.workers) == (1, 2, None)
    resources.write_text("{}")
    assert detect_launchers(read_environment(resources)).node is None


def test_an_interface_is_told_to_gloo_and_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    def told() -> list[str | None]:
        return [os.environ.get(name) for name in INTERFACE_VARIABLES]

    for name in INTERFACE_VARIABLES:
        monkeypatch.setenv(name, "")
    use_interface("eth0", override=False)
    assert told() == ["eth0", "=eth0"]  # NCCL would take eth01 as well
    use_interface("eth1", override=False)
    assert told() == ["eth0", "=eth0"]
    use_interface("eth1", override=True)
    assert told() == ["eth1", "=eth1"]
    assert chosen_interface(dict(os.environ)) == "eth1"


def test_the_launchers_file_counts_for_its_port_alone() -> None:
    ours = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_PORT": "4711",
        "PACELINE_STORE": "4711:/tmp/a:b/store",
    }
    assert store_file(ours) == "/tmp/a:b/store"
    assert store_file({**ours, "MASTER_PORT": "29500"}) == ""  # torchrun in a script
    assert store_file({**ours, "PACELINE_STORE": ""}) == ""
    assert store_file({"MASTER_PORT": "4711"}) == ""
