"""Follows a Slurm job to its end: shows its output, says why it waits, stops it when asked to."""

import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

from paceline.errors import ExitCode, InfrastructureError
from paceline.files import read_json_object
from paceline.launch.slurm import commands
from paceline.launch.slurm.files import ended_path, output_path
from paceline.launch.slurm.requests import Requests
from paceline.launch.slurm.states import JobState, code_of, why_ended
from paceline.launch.slurm.tail import Tail
from paceline.options.shell import command_line
from paceline.results.run_directory import RunDirectory

_LOOK_S = 0.2
_ASK_S = (1.0, 10.0)
"""Between questions to Slurm: at first, and later. A cluster's controller has many to answer."""
_ASK_OFTEN_FOR_S = 30.0
_SETTLE_S = 5.0
"""How long files and Slurm's own word may lag behind each other."""
_SILENT_S = 3600.0
"""How long Slurm may fail to answer: controllers are restarted, and jobs run on."""


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """A job that was submitted."""

    job_id: str
    run: RunDirectory
    python: str

    @property
    def output(self) -> Path:
        """The file of its output."""
        return output_path(self.run, self.job_id)


def follow(job: Submitted, requests: Requests) -> int:
    """Wait for a job's end. Returns the exit code of the training.

    Raises:
        InfrastructureError: Slurm doesn't answer any more.
    """
    tail = Tail(job.output, sys.stdout)
    watch = _Watch(job, requests, tail)
    while watch.code is None:
        tail.pump()
        watch.look()
        time.sleep(_LOOK_S)
    tail.finish()
    if watch.why:
        print(f"paceline: job {job.job_id} ended: {watch.why}", file=sys.stderr, flush=True)
        if (
            watch.code in (ExitCode.RESUMABLE, ExitCode.INFRASTRUCTURE)
            and job.run.run_json.exists()
        ):
            print(f"Go on with it: {command_line('resume', job.run.path)}", file=sys.stderr)
    return watch.code


@final
class _Watch:
    """What is known of a job, and what has been done about it."""

    def __init__(self, job: Submitted, requests: Requests, tail: Tail) -> None:
        self.code: int | None = None
        self.why = ""
        """Why it ended, where it could not say so itself."""
        self._job = job
        self._requests = requests
        self._tail = tail
        self._began_s = self._answered_s = time.monotonic()
        self._ask_again_s = 0.0
        self._ended_s: float | None = None
        self._told = ""
        self._done_requests = 0
        self._workers_told = self._cancelled_in_queue = False

    def look(self) -> None:
        """Look once: has it ended, is it to be stopped, why does it wait?"""
        code = self._own_word()
        now_s = time.monotonic()
        if now_s < self._ask_again_s and self._requests.count == self._done_requests:
            return
        state = self._ask(now_s)
        if state is not None:
            self._tell(state)
            self._heed_requests(state)
        over = state is None or state.ended
        if code is not None and (over or self._has_settled(now_s)):
            self.code = code
        elif over and self._has_settled(now_s):
            self._ended_silently(state)

    def _own_word(self) -> int | None:
        """Give the exit code that the job has left, once it has."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            code = read_json_object(ended_path(self._job.run, self._job.job_id))["code"]
            if type(code) is not int:
                raise ValueError("not an exit code")
            self._ask_again_s = min(self._ask_again_s, time.monotonic())
            return code
        return None

    def _has_settled(self, now_s: float) -> bool:
        if self._cancelled_in_queue:
            return True
        if self._ended_s is None:
            self._ended_s = now_s
        return now_s - self._ended_s >= _SETTLE_S

    def _ask(self, now_s: float) -> JobState | None:
        young = now_s - self._began_s < _ASK_OFTEN_FOR_S or self._requests.count > 0
        self._ask_again_s = now_s + _ASK_S[0 if young or self._ended_s is not None else 1]
        try:
            state = commands.ask(self._job.job_id)
        except InfrastructureError as error:
            self._say(str(error))
            if self._requests.count > 1 or now_s - self._answered_s > _SILENT_S:
                raise InfrastructureError(
                    f"{error}. The job may still run; cancel it later: scancel {self._job.job_id}"
                ) from error
            return JobState(state="UNKNOWN")
        self._answered_s = now_s
        if state is not None and not state.ended and state.state != "COMPLETING":
            self._ended_s = None
        return state

    def _tell(self, state: JobState) -> None:
        if state.waits:
            reason = f": {state.reason}" if state.reason else ""
            self._say(f"Job {self._job.job_id} waits{reason}")
        elif state.state == "RUNNING":
            again = f", restart {state.restarts}" if state.restarts else ""
            self._say(f"Job {self._job.job_id} runs{again}")

    def _say(self, text: str) -> None:
        """Say something on standard error, once until something else is said."""
        if text != self._told:
            self._told = text
            print(text, file=sys.stderr, flush=True)

    def _heed_requests(self, state: JobState) -> None:
        asked, job_id = self._requests.count, self._job.job_id
        if not asked or state.ended:
            return
        if state.waits:
            commands.cancel(job_id)
            self._cancelled_in_queue = True
        elif not self._done_requests:
            commands.forbid_requeue(job_id)
            self._say(
                f"Stopping job {job_id}: its workers write a snapshot and end. "
                "A second signal cancels it at once"
            )
        if asked > 1 and self._done_requests < 2:
            commands.cancel(job_id)
        elif state.state == "RUNNING":
            self._tell_workers()
        self._done_requests = asked

    def _tell_workers(self) -> None:
        """Tell the workers to stop, once; before it has any, a job can't be stopped in order."""
        if not self._workers_told and commands.has_workers(self._job.job_id):
            commands.signal_workers(self._job.job_id)
            self._workers_told = True

    def _ended_silently(self, state: JobState | None) -> None:
        if state is None:
            self.why = "Slurm doesn't know it any more, and it has not said how it ended"
            self.code = int(ExitCode.INFRASTRUCTURE)
            return
        self.code = code_of(state)
        if self.code != ExitCode.DONE or not self._tail.seen:
            self.why = why_ended(state, self._job.python, self._tail.seen)
