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
from functools import partial
from pathlib import Path
from typing import TextIO

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
_RANK = re.compile(r"^\s*rank\s*:\s*(\d+)", re.MULTILINE)
_EXIT_CODE = re.compile(r"^\s*exitcode\s*:\s*(-?\d+)", re.MULTILINE)
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
        process = _start(command, variables, out)
        until_s = time.monotonic() + _START_S
        while process.poll() is None and not stops.count:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_S)
            if time.monotonic() > until_s and not _started(records, workers):
                break  # it waits for something that doesn't come, such as an answer
        _end(process)
    code, interrupted = process.returncode, stops.count > 0
    failures: tuple[WorkerFailure, ...] = ()
    if not interrupted:
        output = _end_of(log)
        _check_workers(command, code, workers, records, output)
        failures = _failures(code, log_dir, output, lacked_memory=oom_kills() > kills_before)
    return LaunchOutcome(results={}, interrupted=interrupted, failures=failures, restarts=0)


def _start(
    command: Sequence[str], variables: Mapping[str, str], out: TextIO
) -> subprocess.Popen[bytes]:
    try:
        return start_apart(command, out, variables)
    except FileNotFoundError as error:
        raise UsageError(
            f"there is no program {command[0]!r}: is its environment active?"
        ) from error
    except PermissionError as error:
        raise UsageError(f"{command[0]!r} can't be run: {error.strerror}") from error


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
    silent = partial(_silent, output=output, lacked_memory=lacked_memory)
    found = {failure.rank: failure for failure in read_failures(log_dir)}
    if not code:
        return root_cause(found.values())
    for rank, exit_code in ended_workers(output).items():
        # The launcher ends the others after the first.
        if rank not in found and exit_code != -signal.SIGTERM:
            found[rank] = silent(rank, exit_code)
    if not found:
        found[0] = silent(0, code)
    return root_cause(found.values())


def _silent(rank: int, code: int, *, output: str, lacked_memory: bool) -> WorkerFailure:
    return silent_failure(
        rank,
        code,
        host=socket.gethostname(),
        step=None,
        operation="",
        out_of_memory=None if lacked_memory else False,
        crash=_last_lines(output),
    )


def ended_workers(output: str) -> dict[int, int]:
    """Read the exit codes of workers, negative for a signal, in what torchrun has printed. Pure.

    Returns:
        By rank, those that torchrun names.
    """
    ranks = list(_RANK.finditer(output))
    ends = [*(found.start() for found in ranks[1:]), len(output)]
    parts = ((int(r[1]), output[r.end() : end]) for r, end in zip(ranks, ends, strict=False))
    return {rank: int(found[1]) for rank, part in parts if (found := _EXIT_CODE.search(part))}


def _check_workers(
    command: Sequence[str], code: int, workers: int, records: Path, output: str
) -> None:
    """Refuse a command that has started fewer workers, or others than those that were observed."""
    started = _started(records, workers)
    if len(started) == workers or (started and code):
        return  # of several workers one may fail before another has begun
    did = f"started {plural(len(started), 'worker')} instead of {workers}" if started else ""
    what = did or f"started no worker that could be observed (exit code {code})"
    raise UsageError(f"`{shlex.join(command)}` {what}. It said last:\n{_last_lines(output)}")


def _started(records: Path, workers: int) -> list[int]:
    return [rank for rank in range(workers) if output_path(records, rank).exists()]


def _end_of(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LAST_BYTES))
        return file.read().decode("utf-8", "replace")


def _last_lines(output: str) -> str:
    return "\n".join(output.rstrip().splitlines()[-_LAST_LINES:]) or "(nothing)"
