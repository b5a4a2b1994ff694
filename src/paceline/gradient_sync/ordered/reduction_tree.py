"""The one tree along which shards are summed, however they are spread over the workers.

Node (level, i) covers the shards [i * 2**level, (i + 1) * 2**level) of [0, shards).
Its sum is that of its left child plus that of its right child; where the right one would begin
beyond the last shard, the left one's sum is the node's own, without arithmetic.
"""

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar, final

T = TypeVar("T")


class Node(NamedTuple):
    """A node of the tree; a shard is a leaf, (0, shard)."""

    level: int
    position: int


def roots(run: range, shards: int) -> list[Node]:
    """List the largest complete subtrees within a contiguous run of shards, from left to right."""
    tree: TreeSum[None] = TreeSum(shards, lambda _left, _right: None)
    for shard in run:
        tree.push(Node(0, shard), None)
    return tree.nodes


def additions(nodes: Sequence[Node], shards: int) -> tuple[list[tuple[int, int]], list[int]]:
    """List what to add to what so that the sums of these nodes become as few as they can.

    Args:
        nodes: Complete subtrees from left to right that cover a contiguous run of shards.
        shards: How many shards there are.

    Returns:
        Pairs of positions in `nodes`: the second is to be added to the first, in this order. Then
        the positions at which sums are left: those of `roots`, for all shards position 0 alone.
    """
    pairs = []

    def add(left: int, right: int) -> int:
        """Note an addition instead of doing it: the sum is where the left term was."""
        pairs.append((left, right))
        return left

    tree = TreeSum(shards, add)
    for position, node in enumerate(nodes):
        tree.push(node, position)
    return pairs, tree.values


@final
class TreeSum(Generic[T]):
    """Adds what comes in shard order, as early as the tree allows.

    What can't be added yet waits: at most log2(shards) + 1 values where all shards come.
    """

    def __init__(self, shards: int, add: Callable[[T, T], T]) -> None:
        """Begin with nothing.

        Args:
            shards: How many shards the tree has.
            add: (left, right) -> their sum; may reuse either.
        """
        self.nodes: list[Node] = []
        """Complete subtrees so far, from left to right."""
        self.values: list[T] = []
        """Their sums."""
        self._shards = shards
        self._height = (shards - 1).bit_length()
        self._add = add

    def push(self, node: Node, value: T) -> None:
        """Take a subtree's sum, the next to the right of what has come."""
        level, place = node
        # Climb as far as siblings are there: each turn takes a finished pair to its parent.
        while level < self._height:
            if place % 2:
                if not self.nodes or self.nodes[-1] != (level, place - 1):
                    break  # its left sibling is another worker's
                self.nodes.pop()
                value = self._add(self.values.pop(), value)
            elif (place + 1) << level < self._shards:
                break  # its right sibling is to come
            level, place = level + 1, place // 2
        self.nodes.append(Node(level, place))
        self.values.append(value)

    def clear(self) -> list[T]:
        """Forget everything, and give back the values that waited."""
        values, self.nodes, self.values = self.values, [], []
        return values
