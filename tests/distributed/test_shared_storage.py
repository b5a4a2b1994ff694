"""Nodes are played by ranks with directories of their own."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.distributed.group import Group
from paceline.distributed.shared_storage import shared_between_nodes
from paceline.errors import InfrastructureError
from tests.support.ranks import RankError, run_ranks

pytestmark = pytest.mark.ranks


def on_nodes(group: Group, nodes: list[int]) -> Group:
    """Place this rank as if the ranks stood on these nodes."""
    own = nodes[group.rank]
    placement = replace(
        group.placement,
        node_rank=own,
        nodes=len(set(nodes)),
        local_rank=nodes[: group.rank].count(own),
        local_world_size=nodes.count(own),
    )
    return Group(placement, group.device, group.backend)


@pytest.mark.parametrize(
    ("nodes", "places", "shared"),
    [
        ([0], "a", True),
        ([0, 0], "ab", True),  # one node: nobody looks
        ([0, 1], "aa", True),
        ([0, 1], "ab", False),
        ([0, 0, 1], "aaa", True),
        ([0, 0, 1], "aab", False),
        ([0, 1, 2], "aab", False),
        ([0, 1, 1], "aab", True),  # only the first worker of a node looks
    ],
)
def test_whether_nodes_share(tmp_path: Path, nodes: list[int], places: str, shared: bool) -> None:
    for name in set(places):
        (tmp_path / name).mkdir()

    def body(group: Group) -> bool:
        return shared_between_nodes(tmp_path / places[group.rank], on_nodes(group, nodes))

    assert run_ranks(len(nodes), body) == [shared] * len(nodes)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_directory_that_rank_0_cant_write(tmp_path: Path) -> None:
    def body(group: Group) -> str:
        with pytest.raises(InfrastructureError) as caught:
            shared_between_nodes(tmp_path / "nowhere", on_nodes(group, [0, 1]))
        return str(caught.value)

    for told in run_ranks(2, body):
        assert re.search(r"nowhere can't be written .*No such file", told)


def test_the_question_can_fail(tmp_path: Path) -> None:
    def body(group: Group) -> bool:
        return shared_between_nodes(tmp_path / str(group.rank), on_nodes(group, [0, 1]))

    (tmp_path / "0").mkdir()
    with pytest.raises(RankError, match="No such file"):
        run_ranks(2, body)
