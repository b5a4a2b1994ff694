"""State of workers on other nodes, which the nodes' watchdogs exchange by files."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import final

from paceline.files import read_json_object
from paceline.launch.watchdog.worker_state import WorkerState
from paceline.options.fields import read_dataclass

_STALE_POLLS = 5


@final
class PeerStatus:
    """The other nodes of a training, as far as they write into the same directory.

    Clocks are never compared: a file counts while the number in it grows.
    """

    def __init__(self, log_dir: Path, own: int, attempt: int) -> None:
        """Create the peer status.

        Args:
            log_dir: Where the files are.
            own: The rank that stands for this node.
            attempt: Number of the attempt; what they left in earlier ones doesn't count.
        """
        self._log_dir = log_dir
        self._own = own
        self._attempt = attempt
        self._sequence = 0
        self._seen: dict[Path, tuple[int, int]] = {}
        """Number in a file, and polls since it grew; -1: it hasn't grown yet."""

    def publish(self, states: Sequence[WorkerState], stacks: Mapping[int, str] | None) -> None:
        """Publish the states of this node's workers.

        Args:
            stacks: By rank, once the training hangs.
        """
        self._sequence += 1
        named = None if stacks is None else {str(rank): text for rank, text in stacks.items()}
        status = _Status(self._attempt, self._sequence, tuple(states), named)
        path = self._path
        temporary = path.with_name(f"{path.name}.new")
        with suppress(OSError):
            # Renamed into place: a reader never sees half of it.
            temporary.write_text(json.dumps(asdict(status)))
            temporary.replace(path)

    def read(self) -> tuple[list[WorkerState], dict[int, str], bool]:
        """Read what the others have published. Call it about every second.

        Returns:
            Their workers, their stacks, and whether all of them have published their stacks.
        """
        states: list[WorkerState] = []
        stacks: dict[int, str] = {}
        complete = True
        for path in self._log_dir.glob(".watch-node-*.json"):
            status = None if path == self._path else self._read(path)
            if status is not None:
                states += status.states
                stacks |= {int(rank): text for rank, text in (status.stacks or {}).items()}
                complete = complete and status.stacks is not None
        return states, stacks, complete

    def leave(self) -> None:
        """Remove this node's file."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    @property
    def _path(self) -> Path:
        return self._log_dir / f".watch-node-{self._own}.json"

    def _read(self, path: Path) -> "_Status | None":
        try:
            status = read_dataclass(_Status, read_json_object(path), strict=True)
        except (OSError, ValueError):
            return None
        if status.attempt != self._attempt:
            return None
        # A file counts once its number has grown under our eyes, and until it stands still.
        before, stale = self._seen.get(path, (status.sequence, -1))
        if status.sequence != before:
            stale = 0
        elif stale >= 0:
            stale += 1
        self._seen[path] = (status.sequence, stale)
        return status if 0 <= stale <= _STALE_POLLS else None


@dataclass(frozen=True)
class _Status:
    """A node's file."""

    attempt: int
    sequence: int
    states: tuple[WorkerState, ...]
    stacks: Mapping[str, str] | None
    """By rank."""
