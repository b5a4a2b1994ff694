"""Submits a training as a Slurm job."""

import os
import shlex
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import final

from paceline.errors import UsageError
from paceline.launch.base import Launcher
from paceline.launch.cluster import ClusterJob, environment_for
from paceline.launch.signals import StopRequests
from paceline.launch.slurm import commands
from paceline.launch.slurm.job import SlurmJob
from paceline.launch.slurm.options import SlurmOptions
from paceline.launch.slurm.script import (
    Submission,
    budget_path,
    ended_path,
    make_submission,
    run_directory,
    script_path,
    workers_per_node,
)
from paceline.options.figures import plural
from paceline.results.run_directory import RunDirectory

_OF_ONE_HOST = ("/tmp", "/var/tmp", "/dev/shm", "/run")
_KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
_BEGINNING = ("train", "run")


@final
class SlurmLauncher(Launcher):
    """Hands a training to Slurm as a batch job that queues itself again."""

    hangup_stops = False  # the job outlives the terminal that it was submitted from

    def __init__(self, options: SlurmOptions) -> None:
        self._options = options

    def render(self, job: ClusterJob) -> str:
        """Write the script, and the command that submits it."""
        submission, run = make_submission(job, self._options, sys.executable), run_directory(job)
        command = shlex.join(("sbatch", *submission.options, str(script_path(run))))
        made = shlex.quote(str(run.slurm))
        return f"{submission.script}\n# submitted by: mkdir -p {made} && {command}\n"

    def submit(self, job: ClusterJob, stop: StopRequests) -> SlurmJob:
        """Submit the script; a signal meanwhile stops the job that comes of it."""
        submission, run = make_submission(job, self._options, sys.executable), run_directory(job)
        if job.command[1:2] and job.command[1] in _BEGINNING:
            run.refuse_to_overwrite()
        _advise(run)
        job_id = _hand_over(submission, run, job_environment(os.environ))
        submitted = SlurmJob(job_id, run, sys.executable)
        workers = plural(workers_per_node(job), "worker")
        print(
            f"Submitted as Slurm job {job_id}: {plural(job.nodes, 'node')}, {workers} on each. "
            f"Output: {submitted.output}"
        )
        return submitted


def job_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Give sbatch's environment, which becomes the job's.

    Without what another job has left there, whose sizes would count for this one.
    """
    kept = environment_for(environment, SlurmOptions)
    return {n: v for n, v in kept.items() if n in _KEPT or not n.startswith("SLURM_")}


def _hand_over(submission: Submission, run: RunDirectory, environment: Mapping[str, str]) -> str:
    """Write the script and submit it. Returns the job's number."""
    script = script_path(run)
    # Write the script; where Slurm refuses the job, take away what was made for it.
    made = [p for p in (run.slurm, run.path, run.path.parent) if not p.exists()]
    try:
        for place in (run.path, run.slurm):
            place.mkdir(run.directory_mode, parents=True, exist_ok=True)
        script.write_text(submission.script)
    except OSError as error:
        raise UsageError(
            f"the run directory {run.path} can't be written ({error.strerror}). "
            "Name another one with --run-dir"
        ) from error
    try:
        job_id = commands.submit_script(submission.options, str(script), environment)
    except BaseException:
        script.unlink(missing_ok=True)
        for path in made:
            with suppress(OSError):
                path.rmdir()
        raise
    for path in (ended_path(run, job_id), budget_path(run, job_id)):
        path.unlink(missing_ok=True)  # a cluster that was set up anew counts from 1 again
    return job_id


def _advise(run: RunDirectory) -> None:
    if any(run.path.is_relative_to(Path(place)) for place in _OF_ONE_HOST):
        print(
            f"{run.path} is usually a directory of this host alone: if the nodes don't see it, the "
            "job can't start. Name one that they share with --run-dir",
            file=sys.stderr,
            flush=True,
        )
