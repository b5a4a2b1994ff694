"""What a user may say about snapshots: how often, and how many are kept. Imports no torch."""

from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.options.durations import parse_duration_s


@dataclass(frozen=True, kw_only=True)
class SnapshotOptions:
    """When snapshots are written besides those at each epoch's end, at the end and on a signal."""

    snapshot_every_steps: int | None = None
    """Write a snapshot every this many steps too; by default only epochs count."""

    snapshot_every: str | None = None
    """Write a snapshot each time this much time has passed too, such as 10m or 1h30m."""

    keep_last: int = 3
    """How many of the newest snapshots are kept, besides the best one; at least 2, so that one
    damaged on disk leaves another to go on from."""

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            UsageError: A value is out of range; the message says which.
        """
        if self.snapshot_every_steps is not None and self.snapshot_every_steps < 1:
            raise UsageError(
                f"snapshot_every_steps is {self.snapshot_every_steps}; it must be at least 1"
            )
        if self.snapshot_every is not None:
            parse_duration_s(self.snapshot_every, "--snapshot-every")
        if self.keep_last < 2:
            raise UsageError(
                f"keep_last is {self.keep_last}; it must be at least 2, "
                "so that a damaged snapshot leaves one to go on from"
            )

    @property
    def every_s(self) -> float | None:
        """`snapshot_every` in seconds."""
        return None if self.snapshot_every is None else parse_duration_s(self.snapshot_every)
