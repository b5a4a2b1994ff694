"""`python -m paceline.tracking`: the process that feeds one tracker beside a training."""

import os
import select
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import final

from paceline.options.text import above_progress, printable
from paceline.results.run_directory import RunDirectory
from paceline.tracking.follow import Follower, alone, follow

BESIDE, ALONE = "beside", "alone"
"""Whether it belongs to a training that has started it, or to `paceline track`."""
_NICENESS = 5
"""A third of the share of a worker that computes on the same core."""


@final
@dataclass
class _End:
    """Finds out whether the training is over."""

    run: RunDirectory
    beside: bool
    limit_s: float
    """For what is left to deliver, beside a training."""
    limited: bool = False

    def __call__(self) -> bool:
        """Look. The first time that it is over, the time begins that is left."""
        over = self.run.summary_json.exists()
        if self.beside:
            # The owner of the run holds the other end of the pipe: it is closed, or the owner dead.
            over = over or bool(select.select([0], [], [], 0)[0])
        else:
            over = over or not self.run.is_locked()
        if over and self.beside and not self.limited:
            self.limited = True
            signal.setitimer(signal.ITIMER_REAL, self.limit_s)  # SIGALRM ends it, wherever it is
        return over


def main(arguments: list[str]) -> int:
    """Feed a tracker; 0 once all is delivered, 1 where it isn't."""
    how, path, name, project, limit_s, *quiet = arguments
    run, beside = RunDirectory.named(path), how == BESIDE
    os.nice(_NICENESS)  # a training on the same cores comes first
    if beside:
        # Sent to all processes of a job that is to end, and this one has the end to deliver.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    first = above_progress("")
    screen = os.dup(2)  # standard output may be one JSON object
    log = os.open(run.tracker_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):  # whatever a tracker's package and its processes print
        os.dup2(log, descriptor)
    os.close(log)

    def say(line: str) -> None:
        with suppress(OSError):
            os.write(screen, f"{first}{printable(line)}\n".encode(errors="replace"))
            os.close(screen)  # whoever reads it needn't wait for this process

    with alone(run, name):
        follower = Follower(run, name, project or None, say, quiet=bool(quiet))
        try:
            done = follow(follower, run, _End(run, beside, float(limit_s)), patient=beside)
        finally:
            follower.close()
    return 0 if done else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
