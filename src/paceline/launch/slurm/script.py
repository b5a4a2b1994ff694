"""What sbatch is given, as pure text: its options, and the script that runs on the first node."""

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.errors import UsageError
from paceline.launch.cluster import ClusterJob
from paceline.launch.continuing import without_option
from paceline.launch.slurm.options import SlurmOptions
from paceline.options.durations import parse_duration_s
from paceline.results.run_directory import RunDirectory


def script_path(run: RunDirectory) -> Path:
    """Name the script of the last job that was submitted."""
    return run.slurm / "job.sh"


def output_path(run: RunDirectory, job_id: str) -> Path:
    """Name the file of a job's output; all its starts append to it."""
    return run.slurm / f"job-{job_id}.log"


def ended_path(run: RunDirectory, job_id: str) -> Path:
    """Name the file that says how a job ended for good."""
    return run.slurm / f"job-{job_id}.ended.json"


def budget_path(run: RunDirectory, job_id: str) -> Path:
    """Name the file that counts a job's restarts."""
    return run.slurm / f"job-{job_id}.restarts.json"


_MINUTE_S = 60.0
_LEFT_BEHIND_S = 60
"""How long workers may outlive the first one that ended: to write a report, or their own error."""
_SET_BY_SLURM = ("--workers", "--max-restarts")
"""Options of the training that Slurm, or the batch script, carries out instead of the workers."""


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A job as it is submitted."""

    options: tuple[str, ...]
    """Words for sbatch's command line. They stand in the script too; those given on the command
    line count before variables such as SBATCH_PARTITION, which count before the script's."""
    script: str


def make_submission(job: ClusterJob, options: SlurmOptions, python: str) -> Submission:
    """Write the job.

    Args:
        python: The interpreter, which every node has at the same place.

    Raises:
        UsageError: Something can't be asked of Slurm.
    """
    _check(job, options)
    words = tuple(sbatch_options(job, options))
    return Submission(options=words, script=script_text(job, words, python))


def run_directory(job: ClusterJob) -> RunDirectory:
    """Name the training's run directory."""
    run = RunDirectory.named(job.directory / Path(job.run_dir).expanduser())
    return replace(run, shared=job.shared)


def output_pattern(job: ClusterJob) -> str:
    """Name the file of the job's output, `%j` standing for the job's number."""
    return str(output_path(_escaped(run_directory(job)), "%j"))


def _escaped(run: RunDirectory) -> RunDirectory:
    """Double what Slurm would take for a pattern."""
    return RunDirectory(Path(str(run.path).replace("%", "%%")))


def workers_per_node(job: ClusterJob) -> int:
    """Give the number of workers on each node: one per GPU unless said otherwise."""
    return job.workers or job.gpus_per_node or 1


def sbatch_options(job: ClusterJob, options: SlurmOptions) -> Iterator[str]:
    """List the options for sbatch, each one word."""
    yield f"--job-name={job.name}"
    if options.partition:
        yield f"--partition={options.partition}"
    if options.account:
        yield f"--account={options.account}"
    yield f"--nodes={job.nodes}"
    yield f"--ntasks-per-node={workers_per_node(job)}"
    if options.cpus_per_worker:
        yield f"--cpus-per-task={options.cpus_per_worker}"
    if job.gpus_per_node:
        yield f"--gpus-per-node={job.gpus_per_node}"
    if job.time_limit_s is not None:
        yield f"--time={_minutes(job.time_limit_s)}"
    # Without `B:` it goes to the workers and not to the script, which lives on to requeue the job.
    yield f"--signal=TERM@{math.ceil(parse_duration_s(options.slurm_grace))}"
    yield "--requeue" if options.slurm_requeue else "--no-requeue"
    yield f"--chdir={job.directory}"
    yield f"--output={output_pattern(job)}"
    yield "--open-mode=append"
    yield from options.slurm_arg


def script_text(job: ClusterJob, words: Sequence[str], python: str) -> str:
    """Write the script."""
    directory = str(run_directory(job).path)
    batch = (python, "-P", "-m", "paceline.launch.slurm.batch")
    workers = ("srun", "--export=ALL", "--kill-on-bad-exit=0", f"--wait={_LEFT_BEHIND_S}")
    paceline = (python, "-P", "-m", *training_command(job.command))
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {directive(word)}" for word in words),
        "",
        "# What the workers print shall be seen at once.",
        "export PYTHONUNBUFFERED=1",
        "# Newer versions of srun ignore sbatch's options for CPUs.",
        'if [ -n "$SLURM_CPUS_PER_TASK" ]; then '
        'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"; fi',
        "",
        "# Runs the workers, one a task, and requeues this job where they were asked to stop.",
        f"exec {shlex.join((*batch, directory, str(job.max_restarts)))} \\",
        f"  {shlex.join(workers)} \\",
        f"  {shlex.join(paceline)}",
        "",
    ]
    return "\n".join(lines)


def directive(word: str) -> str:
    """Quote a word for a line that sbatch reads; to it, a backslash means something in any quotes.

    Args:
        word: Of printable characters, so that it is one line.
    """
    return shlex.quote(word.replace("\\", "\\\\"))


def training_command(command: Sequence[str]) -> list[str]:
    """Give the words of a `paceline` command without what isn't a worker's own business.

    What follows `--` belongs to the user's script and is left alone.
    """
    ours = list(command[: command.index("--")]) if "--" in command else list(command)
    kept = ours
    for flag in _SET_BY_SLURM:
        kept = without_option(kept, flag)
    return [*kept, *command[len(ours) :]]


def _minutes(limit_s: float) -> str:
    """Write a time limit as Slurm reads it; it counts in minutes."""
    hours, minutes = divmod(math.ceil(limit_s / _MINUTE_S), 60)
    return f"{hours}:{minutes:02}:00"


def _check(job: ClusterJob, options: SlurmOptions) -> None:
    if job.resume and job.command[1:2] != ("resume",):
        raise UsageError("--resume isn't for Slurm, where `paceline resume` sees the run directory")
    if job.image is not None:
        raise UsageError(
            f"--image {job.image}: Slurm's nodes run the Python that you submit with. Where the "
            f"cluster starts containers, say so to it: --slurm-arg=--container-image={job.image}"
        )
    if not job.name or not all(c.isalnum() or c in "-_." for c in job.name):
        raise UsageError(f"--job-name is {job.name!r}: use letters, digits, '-', '_' and '.'")
    for what, text in (("working", str(job.directory)), ("run", str(run_directory(job).path))):
        if not text.isprintable() or "\\" in text:
            raise UsageError(f"Slurm can't take the {what} directory {text!r}: rename it")
    grace_s = parse_duration_s(options.slurm_grace)
    if job.time_limit_s is not None and job.time_limit_s < 2 * grace_s:
        raise UsageError(
            f"--time-limit of {job.time_limit_s:g} s leaves no time to train: workers are told to "
            f"stop {grace_s:g} s before (--slurm-grace), and Slurm may do so a minute early"
        )
