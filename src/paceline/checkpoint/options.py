"""Options of snapshots: how often they are written, how many are kept. Imports no torch."""

from dataclasses import dataclass

from paceline.checkpoint.remote.url import OFF, check_url
from paceline.errors import UsageError
from paceline.options.durations import MAX_WAIT_S, parse_duration_s


@dataclass(frozen=True, kw_only=True)
class SnapshotOptions:
    """When snapshots are written besides those at each epoch's end, at the end and on a signal."""

    snapshot_every_steps: int | None = None
    """Write a snapshot every this many steps too; by default only epochs count."""

    snapshot_every: str | None = None
    """Write a snapshot each time this much time has passed too, such as 10m or 1h30m."""

    keep_last: int = 3
    """How many of the newest snapshots are kept, besides the best one; at least 2, so that one
    damaged on disk leaves another to resume from."""

    copy_to: str | None = None
    """Copy each snapshot and the run's small files to a place below this URL, in the background:
    s3://bucket/prefix (extra: paceline[s3]), file:///directory, or any that fsspec has a driver
    for. `paceline resume URL/RUN` goes on from there on a machine that has nothing. none: no
    more."""

    copy_wait_s: float = 120.0
    """Seconds that the end of the training waits for the last copies (Ctrl-C ends the wait)."""

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            UsageError: A value is out of range; the message says which.
        """
        if self.snapshot_every_steps is not None and self.snapshot_every_steps < 1:
            raise UsageError(
                f"--snapshot-every-steps is {self.snapshot_every_steps}; it must be at least 1"
            )
        if self.snapshot_every is not None:
            parse_duration_s(self.snapshot_every, "--snapshot-every")
        if self.keep_last < 2:
            raise UsageError(
                f"--keep-last is {self.keep_last}; it must be at least 2, "
                "so that a damaged snapshot leaves one to resume from"
            )

        if self.copy_to not in (None, OFF):
            check_url(self.copy_to, "--copy-to")
        if not 0 <= self.copy_wait_s <= MAX_WAIT_S:
            raise UsageError(
                f"--copy-wait-s is {self.copy_wait_s}; it must be a number of seconds from 0 to "
                f"{MAX_WAIT_S:,.0f}"
            )

    @property
    def copy_url(self) -> str | None:
        """Where copies go, without a slash at its end; None where none are made."""
        return None if self.copy_to in (None, OFF) else check_url(self.copy_to, "--copy-to")

    @property
    def every_s(self) -> float | None:
        """`snapshot_every` in seconds."""
        return None if self.snapshot_every is None else parse_duration_s(self.snapshot_every)
