"""What a user may say about a study of scaling. Imports no torch."""

from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.gradient_sync.options import SyncMethod
from paceline.gradient_sync.registry import sync_methods
from paceline.options.quantities import parse_sizes
from paceline.results.study import Mode

METHODS: tuple[SyncMethod, ...] = tuple(sync_methods())
PLAIN: SyncMethod = "allreduce"
"""What one worker is always measured with: it combines nothing."""


@dataclass(frozen=True, kw_only=True)
class ScaleOptions:
    """What is measured, how often and for how long."""

    workers: str | None = None
    """Numbers of workers, such as 1,2,4,8, or 1..8 for the same. One worker is always measured:
    efficiency is against it. Default: 1, 2, 4 and so on, up to the workers that the hosts have, or
    GPUs or cores here."""

    mode: Mode = "weak"
    """weak: each worker has the same batch, so that the global batch grows with the workers.
    strong: the global batch stays."""

    repeats: int = 3
    """Measurements of each size. They take turns, so that a disturbance doesn't hit one size."""

    seconds: float = 20.0
    """Seconds of training in each measurement."""

    methods: str | None = None
    """Ways of combining gradients to measure, as in --sync, such as allreduce,local. Default: the
    recipe's own, or allreduce."""

    train: bool = False
    """Also train each size as `paceline train` would, to the end of its epochs or of its time
    budget: what does scaling do to the result?"""

    study_dir: str | None = None
    """Directory of the study. Where it holds this study already, what is missing is measured.
    Default: runs/scale-NAME-TIME."""

    def __post_init__(self) -> None:
        """Check what can be checked alone.

        Raises:
            UsageError: A value is out of range or unknown; the message says which.
        """
        parse_workers(self.workers)
        parse_methods(self.methods)
        if self.repeats < 1:
            raise UsageError(f"--repeats must be at least 1, not {self.repeats}")
        if not 1 <= self.seconds < float("inf"):
            raise UsageError(f"--seconds must be at least 1, not {self.seconds:g}")


def parse_workers(text: str | None) -> tuple[int, ...]:
    """Read numbers of workers, the smallest first; empty where nothing is said.

    Raises:
        UsageError: They are none.
    """
    return () if text is None else parse_sizes(text, "workers")


def parse_methods(text: str | None) -> tuple[SyncMethod, ...]:
    """Read ways of combining gradients; empty where nothing is said.

    Raises:
        UsageError: One is unknown, or stands there twice.
    """
    if text is None:
        return ()
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in METHODS:
            raise UsageError(
                f"--methods is {text}, but {word!r} is none. Known: {', '.join(METHODS)}"
            )
        if words.count(word) > 1:
            raise UsageError(f"--methods is {text}: {word} stands there twice")
    return tuple(words)


def usual_workers(most: int) -> tuple[int, ...]:
    """Choose numbers of workers where nobody says: powers of two, and all that there are."""
    powers = [2**n for n in range(most.bit_length()) if 2**n <= most]
    return tuple(sorted({*powers, most}))
