"""Files of a Slurm job in the run directory: from its script to whoever waits for it."""

from pathlib import Path

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
