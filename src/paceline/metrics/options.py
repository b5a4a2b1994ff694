"""Options of what a training shows and records."""

from dataclasses import dataclass
from typing import Literal

from paceline.results.run_notes import RunNotes


@dataclass(frozen=True, kw_only=True)
class MetricsOptions:
    """What a training shows and records besides metrics.csv."""

    progress: Literal["auto", "bar", "plain", "off"] = "auto"
    """What is shown while training. auto: a progress bar on a terminal, plain lines in a pipe."""

    share_run_dir: bool = False
    """Let others read the run directory, as your umask says: a team's. By default nobody but you
    may enter it."""

    tensorboard: bool = False
    """Also write TensorBoard event files into the run directory (extra: paceline[tensorboard])."""

    name: str | None = None
    """A name for the run, which its directory then has too: runs/NAME-TIME. `paceline runs` shows
    it."""

    tag: tuple[str, ...] = ()
    """A word by which `paceline runs --filter tag=WORD` finds the run. Repeat it for each. With
    --on sagemaker those such as team=vision are the job's as well."""

    note: str | None = None
    """What you want to remember of the run; `paceline label` changes name, tags and note later."""

    def __post_init__(self) -> None:
        self.notes.check()

    @property
    def notes(self) -> RunNotes:
        """Name, tags and note together."""
        return RunNotes(name=self.name or "", tags=self.tag, note=self.note or "")
