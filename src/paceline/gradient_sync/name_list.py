"""Shortens lists of names in messages to the first few."""

from collections.abc import Sequence


def list_names(names: Sequence[str], most: int = 5) -> str:
    """Write `a, b and 7 more`.

    Args:
        names: All of them.
        most: How many are shown.
    """
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
