"""Runs a launching command whose workers are observed, and says how they ended."""

import os
import re
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from paceline.errors import UsageError
from paceline.launch.errors.error_records import forget_failures, read_failures
from paceline.launch.errors.failures import WorkerFailure, root_cause, silent_failure
from paceline.launch.local.launcher import LaunchOutcome
from paceline.launch.local.oom import oom_kills
from paceline.launch.process_tree import start_apart
from paceline.launch.signals import stop_requests
from paceline.options.figures import plural
from paceline.verify.trial import output_path

_POLL_S = 0.1
_STOP_S = 5.0
_START_S = 600.0
"""Most that a launcher may take to start a worker."""
_LAST_LINES = 20
_LAST_BYTES = 1 << 16
_ENDED = re.compile(r"^\s*rank\s*:\s*(\d+).*?^\s*exitcode\s*:\s*(-?\d+)", re.M | re.S)
"""As torchrun sums failed workers up."""


def run_observed(
    command: Sequence[str],
    variables: Mapping[str, str],
    *,
    workers: int,
    records: Path,
    log_dir: Path,
) -> LaunchOutcome:
    """Run a command to its end, whose workers note what they see. Blocks; for the main thread.

    Args:
        variables: Its whole environment.
        log_dir: For all that the command prints, and for records of failures.

    Returns:
        How its workers ended.

    Raises:
        UsageError: The command can't be run, or starts another number of workers.
    """
    log = log_dir / "command.log"
    log_dir.mkdir(0o700, parents=True, exist_ok=True)
    forget_failures(log_dir)
    kills_before = oom_kills()
    # A signal is only noted: raised while a process is being started, it would lose that.
    with log.open("w", encoding="utf-8") as out, stop_requests() as stops:
        try:
            process = start_apart(command, out, variables)
        except OSError as error:
            what = f"{command[0]!r} can't be run: {error.strerror}"
            raise UsageError(f"{what}. Is its environment active?") from error
        until_s = time.monotonic() + _START_S
        while process.poll() is None and not stops.count:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_S)
            if time.monotonic() > until_s and not _started(records, workers):
                break  # it waits for something that doesn't come, such as an answer
        _end(process)
    code = process.returncode
    failures: tuple[WorkerFailure, ...] = ()
    if not stops.count:
        output = log.read_bytes()[-_LAST_BYTES:].decode("utf-8", "replace")
        _check_workers(command, code, workers, records, output)
        failures = _failures(code, log_dir, output, lacked_memory=oom_kills() > kills_before)
    return LaunchOutcome(results={}, interrupted=stops.count > 0, failures=failures, restarts=0)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Have a launcher end its workers; one that takes too long is killed, and they end with it."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
    # What the launcher has left in its session.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _failures(
    code: int, log_dir: Path, output: str, *, lacked_memory: bool
) -> tuple[WorkerFailure, ...]:
    """Collect the workers' own records, what the launcher says of others, or its own end at last.

    Args:
        output: The end of what the command has printed.
        lacked_memory: Whether the kernel has killed a process for want of memory meanwhile.
    """
    found = {failure.rank: failure for failure in read_failures(log_dir)}
    # The launcher ends the others after the first.
    ended = {int(rank): int(n) for rank, n in _ENDED.findall(output) if int(n) != -signal.SIGTERM}
    for rank, number in (ended or {0: code}).items() if code else ():
        if rank not in found and (ended or not found):
            found[rank] = silent_failure(
                rank,
                number,
                host=socket.gethostname(),
                step=None,
                operation="",
                out_of_memory=None if lacked_memory else False,
                crash=_last_lines(output),
            )
    return root_cause(found.values())


def _check_workers(
    command: Sequence[str], code: int, workers: int, records: Path, output: str
) -> None:
    """Refuse a command that has started fewer workers, or others than those that were observed."""
    started = _started(records, workers)
    if len(started) == workers or (started and code):
        return  # of several workers one may fail before another has begun
    did = f"started {plural(len(started), 'worker')} instead of {workers}" if started else ""
    what = did or f"started no worker that could be observed (exit code {code})"
    raise UsageError(f"`{shlex.join(command)}` {what}. Last output:\n{_last_lines(output)}")


def _started(records: Path, workers: int) -> list[int]:
    return [rank for rank in range(workers) if output_path(records, rank).exists()]


def _last_lines(output: str) -> str:
    return "\n".join(output.rstrip().splitlines()[-_LAST_LINES:]) or "(nothing)"
