"""What a worker of `paceline verify` is asked to do, as the JSON that the launcher hands to it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self


class EnoughSeenError(BaseException):
    """Ends a training that has been watched for long enough; no `except Exception` stops it."""


class PassCutError(StopIteration):
    """Ends a pass over a loader of which enough was seen, and a script that expects no end."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One launch of the training that is verified; the same for all its workers."""

    request: str
    """The training itself, a `TrainRequest` as JSON."""
    records: str
    """Directory for what each worker sees."""
    steps: int
    """Steps after which an epoch is cut off."""
    epochs: int = 2
    """Epochs after which the training ends."""
    disturbed: bool = False
    """Whether weights and gradients are disturbed by as much as rounding: the yardstick."""
    keeps_dropout: bool = False
    """Whether dropout drops; otherwise it draws its numbers but changes nothing."""
    on_cpu: bool = False
    """Whether GPUs are hidden from the workers."""
    place: str = ""
    """Directory of the verification, which may be written to."""
    project: str = ""
    """The user's directory that is copied."""
    copy: str = ""
    """Where it is copied; empty: neither copied nor confined, as for Paceline's own recipes."""
    directory: str = ""
    """The user's working directory."""
    writable: Sequence[str] = ()
    """Other directories that may be written to."""
    timeout_s: float = 120.0
    """How long ranks of a plain script wait for one another at most."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Set before the script's first line."""
    notes_state: bool = False
    """Whether the optimizers' states are noted after each step."""
    kill_at: int = 0
    """Step, of any optimizer, after which every worker is killed; 0: none."""
    log_dir: str = ""
    """For records of failures, where another launcher than Paceline's starts the workers."""

    def to_json(self) -> str:
        """Write it as JSON text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote."""
        return cls(**json.loads(text))


def record_path(records: Path, rank: int) -> Path:
    """Name the file with what one worker saw."""
    return records / f"rank-{rank}.jsonl"


def output_path(records: Path, rank: int) -> Path:
    """Name the file with what the script printed on one rank."""
    return records / f"rank-{rank}.output"
