"""`Sink`: what a tracker of experiments has to do. Read this first to add one.

`follow.py` is all that calls a sink, in a process of the tracker's own: what blocks there, raises
or crashes costs no training anything. `registry.py` lists the sinks.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Ending = Literal["finished", "stopped", "failed"]
"""How a training ended; `stopped` by a signal, or killed: it can be resumed."""


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What a tracker gets about a run when it begins, from `run.json`."""

    path: Path
    """The run directory; a sink may keep files of its own in it, in a folder of its name."""
    name: str
    project: str
    """Under which the tracker groups runs."""
    is_project_given: bool
    """Whether `--tracker-project` says so; else the tracker's own variables count before it."""
    config: Mapping[str, object]
    """Settings that aren't the default, the recipe's arguments, the git commit; JSON values."""
    tags: tuple[str, ...] = ()
    note: str = ""
    started_s: float = 0.0
    """When the training was first started, in seconds since 1970."""
    kept_in: str = ""
    """What `Opened.kept_in` has said before; empty the first time."""


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A run that a tracker has begun, or goes on with."""

    id: str
    """By which the tracker knows it; given to `open` after a resume. Where it is another one than
    before, it is given all rows."""
    where: str
    """Where it can be seen, for the user: no credentials in it."""
    kept_in: str = ""
    """Where the tracker keeps the run, absolute and without credentials, where it might be looked
    for elsewhere after a resume: from another working directory, without a variable."""
    last_step: int | None = None
    """The newest step that it has, where the tracker can tell; what is newer is logged again."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Figures at one step; of one epoch where `epoch` is set, of some steps within it otherwise."""

    step: int
    """Optimizer steps since the start of the training; never less than in the row before."""
    time_s: float
    """Training time so far."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """By tag, such as `train/loss`; finite."""
    epoch: int | None = None


class Sink(ABC):
    """One run at one tracker. Made for each connection; after an error it is closed, then replaced.

    Every method may block, and may raise whatever the tracker's package raises: it is tried again
    with a new sink, and the rows of a `log` that failed are given again.
    """

    @abstractmethod
    def open(self, run: RunInfo, previous: str | None) -> Opened:
        """Begin a run, or go on with the one that `open` has named before. Called first, once.

        Args:
            run: The run.
            previous: Its id; None the first time.
        """

    @abstractmethod
    def log(self, rows: Sequence[Row]) -> None:
        """Record rows. Called when there are new ones, of each step once over all resumes."""

    @abstractmethod
    def finish(self, ending: Ending, summary: Mapping[str, float]) -> None:
        """Deliver what is left and end the run; it may be opened again after a resume.

        Args:
            ending: How the training ended.
            summary: Numbers of `summary.json`, such as `best_val_accuracy`.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the connection. Called last, once, in any case; also after an error."""
