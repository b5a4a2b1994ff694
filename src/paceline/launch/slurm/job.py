"""A job submitted to Slurm: its state, by Slurm and by the exit code it leaves, and stopping it."""

import shlex
import time
from contextlib import suppress
from typing import final

from paceline.errors import ExitCode, InfrastructureError
from paceline.files import read_json_object
from paceline.launch.base import Outcome, SubmittedJob
from paceline.launch.slurm import commands
from paceline.launch.slurm.script import ended_path, output_path
from paceline.launch.slurm.states import JobState, code_of, why_ended
from paceline.launch.tail import Tail
from paceline.options.shell import command_line
from paceline.results.run_directory import RunDirectory

_QUERY_S = (1.0, 10.0)
"""Between two queries of Slurm: at first, and later. A cluster's controller has many to answer."""
_QUERY_OFTEN_FOR_S = 30.0
_SETTLE_S = 5.0
"""How long the job's file with its exit code and Slurm's own state may lag behind each other."""
_SILENT_S = 3600.0
"""How long Slurm may fail to answer: controllers are restarted, and jobs run on."""


@final
class SlurmJob(SubmittedJob):
    """A job, its output in the run directory."""

    patience_s = _SILENT_S
    stop_limit_s = float("inf")  # Slurm itself ends what takes longer than it allows

    def __init__(self, job_id: str, run: RunDirectory, python: str) -> None:
        """Take over a job that has been submitted."""
        super().__init__(f"job {job_id}", f"scancel {job_id}", _how_to_stop(job_id, run))
        self.output = output_path(run, job_id)
        self._job_id = job_id
        self._run = run
        self._python = python
        self._tail = Tail(self.output)
        self._began_s = time.monotonic()
        self._over_since_s: float | None = None
        self._has_ended = False
        self._stops = self._stops_passed_on = 0
        self._workers_signalled = self._cancelled = False

    @property
    def poll_s(self) -> float:
        """Often at first, while it stops, and once it has said how it ended."""
        young = time.monotonic() - self._began_s < _QUERY_OFTEN_FOR_S
        ends = (
            self._stops > 0 or self._over_since_s is not None or self._reported_code() is not None
        )
        return _QUERY_S[0 if young or ends else 1]

    def poll(self) -> str | Outcome:
        """Ask Slurm, and look whether the job itself has left its exit code."""
        code = self._reported_code()
        state = self._query(has_ended=code is not None)
        now_s = time.monotonic()
        if state is not None:
            self._pass_on_stops(state)
        over = state is None or state.ended
        # Queued again: what was over goes on.
        if not over and state is not None and state.state not in ("COMPLETING", "UNKNOWN"):
            self._over_since_s = None
        # Ended, as the job says itself; or silently, once its file has had time to arrive.
        if code is not None and (over or self._has_settled(now_s)):
            self._has_ended = True
            return Outcome(code=code)
        if over and self._has_settled(now_s):
            self._has_ended = True
            return self._ended_silently(state)
        return self._describe(state)

    def logs(self) -> str | None:
        """Give whole lines; after the end the rest."""
        text = self._tail.read(whole_lines=not self._has_ended)
        return None if self._has_ended and not text else text

    def stop(self) -> None:
        """Have SIGTERM sent to the workers once there are any: before, nothing can be saved."""
        self._stops = 1

    def cancel(self) -> None:
        """Have Slurm end it at once."""
        self._stops = 2

    def resume_hint(self) -> str:
        """Give the command, once there is something to resume."""
        if not self._run.run_json.exists():
            return ""
        return f"Resume it: {command_line('resume', self._run.path)}"

    def close(self) -> None:
        """Nothing runs here."""

    def _reported_code(self) -> int | None:
        """Read the exit code that the job's own script has written; None before."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            code = read_json_object(ended_path(self._run, self._job_id))["code"]
            if type(code) is not int:
                raise ValueError("not an exit code")
            return code
        return None

    def _query(self, *, has_ended: bool) -> JobState | None:
        try:
            return commands.query_state(self._job_id)
        except InfrastructureError:
            if has_ended and self._stops < 2:
                return JobState(state="UNKNOWN")
            raise

    def _has_settled(self, now_s: float) -> bool:
        if self._cancelled:
            return True
        if self._over_since_s is None:
            self._over_since_s = now_s
        return now_s - self._over_since_s >= _SETTLE_S

    def _pass_on_stops(self, state: JobState) -> None:
        """Do what the user has asked for, as far as the job's state lets it be done."""
        if not self._stops or state.ended:
            return
        # A queued job has nothing to save: cancel it. A running one must not come back.
        if state.waits:
            commands.cancel(self._job_id)
            self._cancelled = True
        elif not self._stops_passed_on:
            commands.forbid_requeue(self._job_id)
        if self._stops > 1 and self._stops_passed_on < 2:
            commands.cancel(self._job_id)
        elif state.state == "RUNNING":
            self._signal_workers()
        self._stops_passed_on = self._stops

    def _signal_workers(self) -> None:
        """Send SIGTERM to the workers, once; before there are any, nothing can be saved."""
        if not self._workers_signalled and commands.has_workers(self._job_id):
            commands.signal_workers(self._job_id)
            self._workers_signalled = True

    def _describe(self, state: JobState | None) -> str:
        if state is None or self._stops:
            return ""
        if state.waits:
            reason = f": {state.reason}" if state.reason else ""
            return f"Job {self._job_id} waits{reason}"
        again = f", restart {state.restarts}" if state.restarts else ""
        return f"Job {self._job_id} runs{again}" if state.state == "RUNNING" else ""

    def _ended_silently(self, state: JobState | None) -> Outcome:
        if state is None:
            why = "Slurm doesn't know it any more, and it has not said how it ended"
            return Outcome(code=ExitCode.INFRASTRUCTURE, reason=why)
        code = code_of(state)
        if code == ExitCode.DONE and self._tail.seen:
            return Outcome(code=code)
        return Outcome(code=code, reason=why_ended(state, self._python, self._tail.seen))


def _how_to_stop(number: str, run: RunDirectory) -> str:
    return (
        f"Follow it:  {shlex.join(('tail', '-F', str(output_path(run, number))))}\n"
        f"Stop it, resumable:  scontrol update jobid={number} requeue=0 && "
        f"scancel --signal=TERM {number}\n"
        f"Resume it:  {command_line('resume', run.path)}"
    )
