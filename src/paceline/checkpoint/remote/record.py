"""`copy.json` in a run directory: where its copies are, whose they are, and how far they have come.

Never copied itself.
"""

import secrets
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Self

from paceline.checkpoint.remote.url import check_url, copies_of
from paceline.errors import UsageError
from paceline.files import read_json_object, why_unreadable, write_json
from paceline.options.fields import read_dataclass
from paceline.results.run_directory import RunDirectory

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class CopyRecord:
    """State of a run's remote copies, as `copy.json` holds it."""

    url: str
    """Of this run's copies: its own place below what `--copy-to` says."""
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    """What this run directory writes into the owner's mark of each of its places; no credential."""
    takes_over: str | None = None
    """The token found there when the run was fetched: that owner's copies are gone on with."""
    newest_step: int = -1
    """Of the newest snapshot that is whole there; -1 where none is."""
    snapshots: int = 0
    """How many were copied."""
    skipped: int = 0
    """How many were left out, since newer ones had come or they were gone."""
    failures: int = 0
    last_failure: str | None = None
    complete: bool = False
    """Whether everything is there as it is here, at the end."""

    @classmethod
    def read(cls, run: RunDirectory) -> Self | None:
        """Read a run directory's; None where it has none.

        Raises:
            UsageError: It can't be read, or holds something else.
        """
        try:
            content = read_json_object(run.copy_json)
            if content.pop("format", None) != FORMAT:
                raise ValueError(f"it isn't of format {FORMAT}")
            if not isinstance(content.get("token"), str):
                raise ValueError("it has no token")
            check_url(str(content.get("url")), "its url")
            return read_dataclass(cls, content, strict=True)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            why = why_unreadable(error) if isinstance(error, OSError | ValueError) else str(error)
            raise UsageError(
                f"{run.copy_json} can't be read: {why}. Remove it, and give another --copy-to"
            ) from error

    @classmethod
    def for_run(cls, run: RunDirectory, copy_to: str) -> Self:
        """Say where a run's copies go: where they went before, or to a place of its name."""
        before = cls.read(run)
        if before is not None and before.url.rpartition("/")[0] == copy_to:
            return replace(before, complete=False)
        url = copies_of(copy_to, run.path.name)
        # One token for all its places, so that it can go back to one that it has had before.
        return cls(url=url) if before is None else cls(url=url, token=before.token)

    def write(self, run: RunDirectory) -> None:
        """Write it; on a full disk, or where the directory is gone, the last one stays."""
        with suppress(OSError):
            write_json(run.copy_json, {"format": FORMAT, **asdict(self)})

    def for_summary(self) -> dict[str, object]:
        """List what `summary.json` says of the copies."""
        content = asdict(self)
        del content["token"], content["takes_over"]
        return content
