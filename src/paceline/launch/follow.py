"""Follows a job to its end, on whatever cluster: output, states, signals, detaching, exit code."""

import sys
import time
from contextlib import closing, suppress
from typing import final

from paceline.errors import ExitCode, InfrastructureError
from paceline.launch.base import JobLostError, Launcher, Outcome, SubmittedJob
from paceline.launch.cluster import ClusterJob
from paceline.launch.signals import StopRequestedError, StopRequests, stop_requests

LOOK_S = 0.2
"""Between two looks for output and signals."""
_LATE_S = 30.0
"""How long output may come later than the job's end."""
_RESUMABLE = (ExitCode.RESUMABLE, ExitCode.INFRASTRUCTURE)


def launch(launcher: Launcher, job: ClusterJob) -> int:
    """Hand a training to a cluster and, unless detached, follow it to its end. Blocks.

    Returns:
        The training's exit code.

    Raises:
        UsageError: The cluster's program isn't here or refuses the job.
        InfrastructureError: The cluster failed, or the job may still run and can't be followed.
    """
    if job.dry_run:
        print(launcher.render(job), end="")
        return ExitCode.DONE
    with stop_requests(hangup=launcher.hangup_stops) as stop:
        try:
            submitted = launcher.submit(job, stop)
        except StopRequestedError:
            print(f"{job.name} was stopped before it was submitted", file=sys.stderr)
            return ExitCode.RESUMABLE
        # From here on a job exists: follow it, unless the user has detached from it.
        with closing(submitted):
            sys.stdout.flush()
            if job.detach and submitted.after_detaching is not None and not stop.count:
                if submitted.after_detaching:
                    print(submitted.after_detaching, flush=True)
                return ExitCode.DONE
            return follow(submitted, stop)


def follow(job: SubmittedJob, stop: StopRequests) -> int:
    """Show a job's output and states until it has ended. Blocks.

    Args:
        stop: The first signal stops it, with a snapshot; the second doesn't wait for that.

    Returns:
        Its exit code.

    Raises:
        InfrastructureError: It may still run, and can't be followed any further.
    """
    outcome = _Following(job, stop).to_the_end()
    if outcome.details:
        print(outcome.details, file=sys.stderr, flush=True)
    if outcome.reason and outcome.code == ExitCode.DONE:
        print(outcome.reason, flush=True)
    elif outcome.reason:
        print(f"paceline: {job.name} ended: {outcome.reason}", file=sys.stderr, flush=True)
        hint = job.resume_hint() if outcome.code in _RESUMABLE else ""
        if hint:
            print(hint, flush=True)
    return int(outcome.code)


@final
class _Following:
    """One job, and what was shown of it and done about it so far."""

    def __init__(self, job: SubmittedJob, stop: StopRequests) -> None:
        self._job = job
        self._stop = stop
        self._answered_s = time.monotonic()
        self._polled_s = float("-inf")
        self._stop_requests = 0
        self._stop_by_s = float("inf")
        self._last_status = ""

    def to_the_end(self) -> Outcome:
        """Follow it."""
        while True:
            outcome = self._pass_on_signals() or self._poll()
            if outcome is not None:
                return outcome
            time.sleep(LOOK_S)

    def _pass_on_signals(self) -> Outcome | None:
        """Stop the job at the first signal, cancel it at the second."""
        if self._stop.count <= self._stop_requests:
            return None
        self._stop_requests += 1
        # Ask for the job's state at once: it is about to change.
        self._polled_s = float("-inf")
        # Second signal: cancel; first: ask to stop, and give it the time for a snapshot.
        if self._stop_requests == 2:
            return self._job.cancel()
        if self._stop_requests == 1:
            self._print_line(
                f"Stopping {self._job.name}: it may write a snapshot first. "
                "A second signal doesn't wait for that"
            )
            self._stop_by_s = time.monotonic() + self._job.stop_limit_s
            try:
                self._job.stop()
            except InfrastructureError as error:
                raise self._job.lost(str(error)) from error
        return None

    def _poll(self) -> Outcome | None:
        """Show what is new, and ask how the job is where that is due."""
        try:
            # Output at every look, the state every `poll_s` seconds.
            _show(self._job.logs())
            now_s = time.monotonic()
            if now_s < self._polled_s + self._job.poll_s:
                return None
            self._polled_s = now_s
            state = self._job.poll()
        except JobLostError:
            raise
        except InfrastructureError as error:
            self._tolerate(error)
            return None
        # The cluster has answered: its patience starts anew.
        self._answered_s = now_s
        # Ended, or still running and perhaps later than a stop allows.
        if isinstance(state, Outcome):
            self._show_rest()
            return state
        self._print_line(state)
        if now_s > self._stop_by_s:
            raise self._job.lost(f"it hasn't stopped within {self._job.stop_limit_s:g} s")
        return None

    def _tolerate(self, error: InfrastructureError) -> None:
        """Ignore for a while that a cluster doesn't answer, unless the user wants to leave.

        Raises:
            JobLostError: The while is over.
        """
        silent_s = time.monotonic() - self._answered_s
        if silent_s > self._job.patience_s or self._stop_requests > 1:
            raise self._job.lost(str(error)) from error
        self._print_line(str(error))

    def _show_rest(self) -> None:
        """Show what comes after the job's end; a further signal doesn't wait for it."""
        deadline_s = time.monotonic() + _LATE_S
        signals = self._stop.count
        with suppress(InfrastructureError):
            while (text := self._job.logs()) is not None:
                _show(text)
                if time.monotonic() > deadline_s or self._stop.count > signals:
                    return
                if not text:
                    time.sleep(LOOK_S)

    def _print_line(self, text: str) -> None:
        """Say something on standard error, once until something else is said."""
        if text and text != self._last_status:
            self._last_status = text
            print(text, file=sys.stderr, flush=True)


def _show(text: str | None) -> None:
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()
