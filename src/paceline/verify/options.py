"""Options of `paceline verify`. Imports no torch."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.errors import UsageError
from paceline.options.fields import flag

COUNTS = "1,2"


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """What is compared, how closely, and where the findings go."""

    workers: str = COUNTS
    """Numbers of workers to train on; the others are compared with the smallest. For a launching
    command the default is 1 and the number that it says."""
    steps: int = 50
    """Steps after which an epoch is cut off. Two epochs are trained, with --resume three."""
    tolerance: float | None = None
    """Relative difference of gradients and weights that counts as rounding. Default: measured, by
    one more training that is disturbed in its last bits."""
    resume: bool = False
    """Kill the training at a step and start it again, by its own checkpoints, twice; compare with
    an undisturbed one. On --workers, one number; by default 1, or what a launching command says."""
    resume_args: str | None = None
    """With --resume: arguments that the script is given when it is started again, besides its own,
    such as '--resume last.pt'."""
    resume_workers: int | None = None
    """With --resume: another number of workers, on which it is started again."""
    kill_at_step: int | None = None
    """With --resume: the step after which all workers are killed, the first time; the second
    follows from it. Default: drawn at random, in the second of three epochs."""
    writable: tuple[str, ...] = ()
    """A directory that the script may write to, besides the copy of the project that it runs in.
    Repeat it for several."""
    json: str | None = None
    """Also write all that was found to this file."""
    format: Literal["text", "github"] = "text"
    """github: print annotations behind the text, by which GitHub Actions shows what was found at
    its line of the script."""
    html: str | None = None
    """Also write a page to this file: the verdict, the losses over each other, the first step that
    differs, causes and lines. It needs no network."""

    def __post_init__(self) -> None:
        """Check ranges, and what goes together.

        Raises:
            UsageError: An option has no effect, or can't be.
        """
        for name in () if self.resume else ("resume_args", "resume_workers", "kill_at_step"):
            if getattr(self, name) is not None:
                raise UsageError(f"{flag(name)} has no effect without --resume")
        try:
            shlex.split(self.resume_args or "")
        except ValueError as error:
            raise UsageError(f"--resume-args is {self.resume_args}: {error}") from error
        if self.kill_at_step is not None and self.kill_at_step < 1:
            raise UsageError(f"--kill-at-step must be at least 1, not {self.kill_at_step}")
        for directory in self.writable:
            if not Path(directory).expanduser().is_dir():
                raise UsageError(f"--writable {directory}: there is no such directory")
        if self.steps < 1:
            raise UsageError(f"--steps must be at least 1, not {self.steps}")
        if self.tolerance is not None and not self.tolerance >= 0:
            raise UsageError(f"--tolerance must be at least 0, not {self.tolerance:g}")

    @property
    def epochs(self) -> int:
        """Epochs that are trained: to resume, one before and one after that of the kill."""
        return 3 if self.resume else 2

    @property
    def resume_words(self) -> tuple[str, ...]:
        """Arguments of the script as it resumes, besides its own."""
        return tuple(shlex.split(self.resume_args or ""))

    @property
    def json_file(self) -> Path | None:
        """Where all that was found is to be written."""
        return None if self.json is None else Path(self.json).expanduser()

    @property
    def html_file(self) -> Path | None:
        """Where the page is to be written."""
        return None if self.html is None else Path(self.html).expanduser()
