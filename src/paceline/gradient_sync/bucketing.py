"""Groups neighbouring items into buckets of a least size. Imports no torch."""

from collections.abc import Iterator, Sequence


def group_by_bytes(sizes: Sequence[int], first: int, most: int) -> Iterator[list[int]]:
    """Group what comes one after another; nothing is split.

    Args:
        sizes: In bytes.
        first: Bytes at which the first group is full.
        most: Bytes at which each other is; what is left at the end is a group of its own.

    Yields:
        Places in `sizes`, ascending.
    """
    group: list[int] = []
    full, held = first, 0
    for place, size in enumerate(sizes):
        group.append(place)
        held += size
        if held >= full or place == len(sizes) - 1:
            yield group
            group, held, full = [], 0, most
