"""Options of what a training shows and records."""

from dataclasses import dataclass
from typing import Literal

from paceline.errors import UsageError
from paceline.options.durations import parse_duration_s
from paceline.options.quantities import parse_count
from paceline.options.text import printable

LOG_LEAST_S = 0.5
"""The shortest time between two rows: workers exchange their figures about as often."""
_NAME_BYTES, _TAG_BYTES, _NOTE_BYTES = 150, 100, 10_000


@dataclass(frozen=True, kw_only=True)
class MetricsOptions:
    """What a training shows and records besides metrics.csv."""

    progress: Literal["auto", "bar", "plain", "off"] = "auto"
    """What is shown while training. auto: a progress bar on a terminal, plain lines in a pipe."""

    log_every: int | str = "auto"
    """How often figures within an epoch are recorded in steps.csv: after a number of steps, such as
    50, or a time, such as 5s or 1m. auto: about 200 times an epoch, and every 10 s."""

    share_run_dir: bool = False
    """Let others read the run directory, as your umask says: a team's. By default nobody but you
    may enter it."""

    tensorboard: bool = False
    """Also write TensorBoard event files into the run directory (extra: paceline[tensorboard])."""

    tracker: tuple[str, ...] = ()
    """Also show the run at a tracker: wandb, mlflow (extras paceline[wandb], paceline[mlflow]), or
    one that another package adds. Repeat it for several."""

    tracker_project: str | None = None
    """W&B's project, MLflow's experiment. Default: what the tracker's own variables say, then the
    recipe's name."""

    name: str | None = None
    """A name for the run, which its directory then has too: runs/NAME-TIME."""

    tag: tuple[str, ...] = ()
    """A tag for trackers and for `paceline runs --json`. Repeat it for each."""

    note: str | None = None
    """What you want to remember of the run; run.json and trackers have it."""

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            UsageError: A value is out of range; the message says which.
        """
        _check_line("--name", self.name or "", _NAME_BYTES)
        for tag in self.tag:
            _check_line("--tag", tag, _TAG_BYTES)
            if not tag or tag != tag.strip():
                raise UsageError(f"--tag {tag!r} is empty, or has a space at an end")
        _check_line("--note", self.note or "", _NOTE_BYTES)
        steps, every_s = self.log_every_steps, self.log_every_s
        if steps is not None and steps < 1:
            raise UsageError(f"--log-every is {self.log_every}; it must be at least 1 step")
        if every_s is not None and every_s < LOG_LEAST_S:
            raise UsageError(
                f"--log-every is {self.log_every!r}; a time must be at least {LOG_LEAST_S:g} s. "
                "For more rows give a number of steps, such as 1"
            )

    @property
    def log_every_steps(self) -> int | None:
        """`log_every` where it is a number of steps."""
        every = self.log_every
        return every if isinstance(every, int) else parse_count(every)

    @property
    def log_every_s(self) -> float | None:
        """`log_every` in seconds where it is a time."""
        if self.log_every == "auto" or self.log_every_steps is not None:
            return None
        text = str(self.log_every).strip()
        if text[-1:].isdigit() or not text[:1].isdigit():
            raise UsageError(
                f"--log-every is {self.log_every!r}. Give auto, a whole number of steps, such as "
                "50, or a time with its unit, such as 5s"
            )
        return parse_duration_s(text, "--log-every")


def _check_line(flag: str, value: str, most_bytes: int) -> None:
    if printable(value) != value or "\n" in value:
        raise UsageError(f"{flag} {value!r} should be a line of text, without control characters")
    if len(value.encode()) > most_bytes:
        raise UsageError(f"{flag} has more than {most_bytes:,} bytes: {value[:40]!r}...")
