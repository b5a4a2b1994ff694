"""Writes a run's report once the training is over; whatever becomes of it, the training is done."""

import subprocess
import sys
import traceback
from collections.abc import Callable

from paceline.config.commands import command_line
from paceline.config.rundir import RunDirectory

WriteReport = Callable[[RunDirectory], None]

_MOST_S = 120.0


def write_report(run: RunDirectory) -> None:
    """Write the report in this process."""
    from paceline.report.run import write_run_report

    try:
        write_run_report(run)
    except OSError as error:
        _tell(run, str(error))
    except Exception:  # noqa: BLE001  # a fault of ours must not cost the training its end
        _tell(run, traceback.format_exc())


def write_report_apart(run: RunDirectory) -> None:
    """Write the report in a process of its own: what draws it would swell this worker's memory."""
    command = [sys.executable, "-m", "paceline", "report", str(run.path)]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_MOST_S,
            check=False,
            start_new_session=True,  # Ctrl-C is for the training
        )
    except (OSError, subprocess.SubprocessError) as error:
        _tell(run, str(error))
        return
    if done.returncode:
        _tell(run, done.stderr.strip().removeprefix("paceline: "))


def _tell(run: RunDirectory, why: str) -> None:
    again = command_line("report", run.path)
    print(
        f"paceline: the report could not be written: {why}\nTry again: {again}",
        file=sys.stderr,
        flush=True,
    )
