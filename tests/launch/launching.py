"""Launching entries of entries.py from a test process."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.launch.local import launcher
from paceline.launch.local.launcher import LaunchOutcome, launch_local
from paceline.launch.restart_policy import Policy
from paceline.launch.watchdog.hang_detector import HangLimits


@dataclass
class Launch:
    """Launch entries of entries.py in this process; collect the lines reported."""

    log_dir: Path
    lines: list[str]
    progress: Callable[[], int] = lambda: -1
    max_restarts: int = 0
    hang: HangLimits | None = None

    def __call__(self, entry: str, payload: str = "", workers: int = 2) -> LaunchOutcome:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launcher, "to_stderr", self.lines.append)
            return launch_local(
                f"entries:{entry}",
                payload,
                workers=workers,
                threads=1,
                policy=Policy(max_restarts=self.max_restarts, hang=self.hang),
                log_dir=self.log_dir,
                progress=self.progress,
            )
