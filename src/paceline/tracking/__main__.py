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

_NICENESS = 5
"""A third of the share of a worker that computes on the same core."""


@final
@dataclass
class _End:
    """Finds out whether the training is over."""

    run: RunDirectory
    limit_s: float
    """For what is left to deliver."""
    limited: bool = False

    def __call__(self) -> bool:
        """Look. The first time that it is over, the time begins that is left."""
        # The owner of the run holds the other end of the pipe: it is closed, or the owner dead.
        over = self.run.summary_json.exists() or bool(select.select([0], [], [], 0)[0])
        if over and not self.limited:
            self.limited = True
            signal.setitimer(signal.ITIMER_REAL, self.limit_s)  # SIGALRM ends it, wherever it is
        return over


def main(arguments: list[str]) -> int:
    """Feed a tracker; 0 once all is delivered, 1 where it isn't."""
    path, name, project, limit_s, *quiet = arguments
    run = RunDirectory.named(path)
    os.nice(_NICENESS)  # a training on the same cores comes first
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
            done = follow(follower, run, _End(run, float(limit_s)))
        finally:
            follower.close()
    return 0 if done else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
