"""The same additions, however the shards are spread over the workers."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.distributed.work_division import Division
from paceline.gradient_sync.ordered.reduction_tree import Node, TreeSum, additions, roots


def joined(left: str, right: str) -> str:
    return f"({left}+{right})"


def by_definition(level: int, index: int, shards: int) -> str:
    """Write down a node's sum, from the top down."""
    if level == 0:
        return str(index)
    left = by_definition(level - 1, 2 * index, shards)
    if (2 * index + 1) << (level - 1) >= shards:
        return left
    return joined(left, by_definition(level - 1, 2 * index + 1, shards))


def whole(shards: int) -> str:
    return by_definition((shards - 1).bit_length(), 0, shards)


def gathered(pushed: list[tuple[Node, str]], shards: int) -> list[tuple[Node, str]]:
    tree = TreeSum(shards, joined)
    for node, value in pushed:
        tree.push(node, value)
    return list(zip(tree.nodes, tree.values, strict=True))


def leaves(run: range) -> list[tuple[Node, str]]:
    return [(Node(0, shard), str(shard)) for shard in run]


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, list[range]]:
    """A number of shards and runs of any lengths that cover them."""
    shards = draw(st.integers(1, 70))
    inner = draw(st.sets(st.integers(1, shards - 1))) if shards > 1 else set[int]()
    bounds = [0, *sorted(inner), shards]
    return shards, [range(a, b) for a, b in pairwise(bounds)]


@pytest.mark.parametrize(
    ("shards", "expression"),
    [
        (1, "0"),
        (2, "(0+1)"),
        (3, "((0+1)+2)"),
        (5, "(((0+1)+(2+3))+4)"),
        (6, "(((0+1)+(2+3))+(4+5))"),
        (7, "(((0+1)+(2+3))+((4+5)+6))"),
        (8, "(((0+1)+(2+3))+((4+5)+(6+7)))"),
    ],
)
def test_the_tree_is_this_one(shards: int, expression: str) -> None:
    assert gathered(leaves(range(shards)), shards)[0][1] == expression


@given(cuts())
def test_any_spread_gives_the_same_expression(spread: tuple[int, list[range]]) -> None:
    shards, parts = spread
    pushed = [pair for part in parts for pair in gathered(leaves(part), shards)]
    ((node, expression),) = gathered(pushed, shards)
    assert expression == whole(shards)
    assert node == ((shards - 1).bit_length(), 0)


@given(cuts(), st.data())
def test_a_hierarchy_of_any_depth_gives_the_same_expression(
    spread: tuple[int, list[range]], data: st.DataObject
) -> None:
    """Workers within nodes within racks: at each level neighbours add what they can."""
    shards, parts = spread
    level = [gathered(leaves(part), shards) for part in parts]
    while len(level) > 1:
        size = data.draw(st.integers(2, len(level)))
        groups = [level[i : i + size] for i in range(0, len(level), size)]
        level = [gathered([p for part in group for p in part], shards) for group in groups]
    assert [expression for _, expression in level[0]] == [whole(shards)]


@given(cuts())
def test_roots_are_complete_and_none_of_them_could_be_larger(
    spread: tuple[int, list[range]],
) -> None:
    shards, parts = spread
    for part in parts:
        found = roots(part, shards)
        covered = [
            shard
            for level, index in found
            for shard in range(index << level, min((index + 1) << level, shards))
        ]
        assert covered == list(part)
        for level, index in found:
            if (1 << level) < shards:
                begin, end = index // 2 << level + 1, min((index // 2 + 1) << level + 1, shards)
                assert not (begin in part and end - 1 in part)
        assert len(found) <= max(1, 2 * (shards - 1).bit_length())


@given(cuts())
def test_the_list_of_additions_is_the_rest_of_the_tree(spread: tuple[int, list[range]]) -> None:
    shards, parts = spread
    held = [pair for part in parts for pair in gathered(leaves(part), shards)]
    values = [value for _, value in held]
    pairs, remaining = additions([node for node, _ in held], shards)
    for left, right in pairs:
        assert left < right
        values[left] = joined(values[left], values[right])
    assert remaining == [0]
    assert values[0] == whole(shards)


@given(cuts())
def test_what_some_workers_hold_becomes_what_one_in_their_place_would(
    spread: tuple[int, list[range]],
) -> None:
    shards, parts = spread
    some = parts[len(parts) // 3 :]
    held = [pair for part in some for pair in gathered(leaves(part), shards)]
    values = [value for _, value in held]
    pairs, remaining = additions([node for node, _ in held], shards)
    for left, right in pairs:
        values[left] = joined(values[left], values[right])
    of_one = gathered(leaves(range(some[0].start, some[-1].stop)), shards)
    assert [values[place] for place in remaining] == [value for _, value in of_one]
    assert remaining[0] == 0


@given(st.integers(0, 7), st.integers(0, 7))
def test_powers_of_two_keep_one_subtree_a_worker_and_few_values(a: int, b: int) -> None:
    shards, workers = 1 << max(a, b), 1 << min(a, b)
    division = Division.of(shards, workers)
    for part in map(division.parts_of, range(workers)):
        assert len(roots(part, shards)) == 1
        tree, most = TreeSum(shards, joined), 0
        for node, value in leaves(part):
            tree.push(node, value)
            most = max(most, len(tree.values))
        assert most <= max(1, (shards // workers).bit_length() - 1)


def test_what_waits_is_given_back() -> None:
    tree = TreeSum(4, joined)
    tree.push(Node(0, 0), "0")
    assert tree.clear() == ["0"]
    assert tree.nodes == []
    assert tree.values == []
