"""Runs commands that reach hosts, for all hosts at once; they can be stopped at any time."""

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import TypeVar, final

from paceline.errors import InfrastructureError

Item = TypeVar("Item")
Result = TypeVar("Result")

_POLL_S = 0.1


@final
class Commands:
    """Commands that run at the same time and are ended together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._ended = False

    def run(
        self, command: Sequence[str], timeout_s: float, text: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run one to its end.

        Args:
            timeout_s: After that it is killed, with all that it has started.

        Raises:
            FileNotFoundError: There is no such program.
            subprocess.TimeoutExpired: It took longer.
            InfrastructureError: They were ended before this one was started.
        """
        process = self._start(command)
        try:
            stdout, stderr = process.communicate(text, timeout_s)
        except subprocess.TimeoutExpired:
            _kill(process)
            process.communicate()
            raise
        finally:
            with self._lock:
                self._running.discard(process)
        return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)

    def end(self) -> None:
        """Kill those that run, and start no others."""
        with self._lock:
            self._ended = True
            for process in self._running:
                _kill(process)

    def _start(self, command: Sequence[str]) -> subprocess.Popen[str]:
        # Start and registration are one step under the lock: `end` misses no process.
        with self._lock:
            if self._ended:
                raise InfrastructureError(f"{command[0]} wasn't started: all is being ended")
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # a group of its own, which is killed as a whole
            )
            self._running.add(process)
            return process


def on_each(
    items: Sequence[Item],
    work: Callable[[Item, Commands], Result],
    stop: threading.Event | None = None,
) -> list[Result]:
    """Do something for each item, all at once; where one fails, the others are ended.

    Whatever is raised here meanwhile, such as by a handler of Ctrl-C, ends them all too.

    Args:
        work: What is done, in a thread; what it runs goes through the commands that it is given.
        stop: Set by another thread, it ends them all.

    Returns:
        What it gave for each, in the same order.

    Raises:
        InfrastructureError: It was stopped.
    """
    commands = Commands()
    with ThreadPoolExecutor(max(1, len(items))) as pool:
        try:
            futures = [pool.submit(work, item, commands) for item in items]
            pending = set(futures)
            while pending:
                pending = wait(pending, _POLL_S, FIRST_EXCEPTION).not_done
                # The first failure is raised here, and ends the others below.
                for future in futures:
                    if future.done():
                        future.result()
                if pending and stop is not None and stop.is_set():
                    raise InfrastructureError("stopped before the hosts were ready")
            return [future.result() for future in futures]
        except BaseException:
            # Inside the pool's block, whose exit waits for all threads.
            commands.end()
            raise


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError, PermissionError):  # macOS refuses where all have ended
        os.killpg(process.pid, signal.SIGKILL)
