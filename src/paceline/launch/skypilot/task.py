"""SkyPilot's task file for a training. Pure."""

import shlex

from paceline._version import __version__
from paceline.errors import ExitCode, UsageError
from paceline.launch.cluster import ClusterJob
from paceline.launch.node_command import NodeRun, node_command, run_dir_on
from paceline.launch.skypilot.options import SkypilotOptions
from paceline.launch.yaml_text import Plain

BUCKET_PATH = "/paceline-runs"
"""Where the bucket is mounted on the nodes."""
EXIT_LINE = "paceline: exit code "
"""What each node prints at its end, since SkyPilot doesn't pass exit codes on."""
_KILL_AFTER_S = 120


def task(job: ClusterJob, options: SkypilotOptions, name: str, submission: str) -> dict[str, Plain]:
    """Write the task.

    Args:
        submission: What makes the name different from every other.
    """
    written: dict[str, Plain] = {
        "name": name,
        "num_nodes": job.nodes,
        "resources": _resources(job, options),
        "workdir": str(job.directory),
    }
    if options.keep_in:
        # MOUNT_CACHED alone can rename a directory, by which a snapshot becomes whole
        mount: dict[str, Plain] = {"source": options.keep_in, "mode": "MOUNT_CACHED"}
        written["file_mounts"] = {BUCKET_PATH: mount}
    return written | {"setup": _setup(options), "run": _run(job, options, submission)}


def run_dir(job: ClusterJob, options: SkypilotOptions) -> str:
    """Say where the run directory lies on the nodes."""
    return run_dir_on(BUCKET_PATH, job.run_dir) if options.keep_in else job.run_dir


def _resources(job: ClusterJob, options: SkypilotOptions) -> dict[str, Plain]:
    wanted: dict[str, Plain] = {}
    if options.cloud:
        wanted["infra"] = options.cloud
    if options.gpu_type:
        wanted["accelerators"] = f"{options.gpu_type}:{job.gpus_per_node or 1}"
    elif job.gpus_per_node:
        raise UsageError("--gpus-per-node needs --gpu-type with SkyPilot, such as A100")
    if options.cloud_cpus:
        wanted["cpus"] = options.cloud_cpus
    if options.cloud_memory:
        wanted["memory"] = options.cloud_memory
    if job.image:
        wanted["image_id"] = f"docker:{job.image}"
    if not options.use_spot:
        stop: dict[str, Plain] = {"idle_minutes": options.idle_minutes, "down": True}
        return wanted | {"autostop": stop}
    # the nodes themselves count how often they were started without a newer snapshot
    again: list[Plain] = [int(ExitCode.INFRASTRUCTURE)]
    if job.time_limit_s is None:  # else its end is by its time, not by a machine that is taken away
        again.append(int(ExitCode.RESUMABLE))
    recovery: dict[str, Plain] = {"max_restarts_on_errors": 0, "recover_on_exit_codes": again}
    return wanted | {"use_spot": True, "job_recovery": recovery}


def _setup(options: SkypilotOptions) -> str:
    if options.sky_setup is not None:
        return f"{options.sky_setup}\n"
    wanted = shlex.quote(f"paceline=={__version__}")
    return f"python3 -c 'import paceline' || python3 -m pip install {wanted}\n"


def _run(job: ClusterJob, options: SkypilotOptions, submission: str) -> str:
    """Write the script of a node: the training, within its time, and its exit code for the log."""
    command = node_command(
        job,
        NodeRun(
            submission=submission,
            run_dir=run_dir(job, options),
            max_restarts=job.max_restarts if options.use_spot else None,
        ),
    )
    if job.time_limit_s is not None:
        limit = ["timeout", "--preserve-status", f"--kill-after={_KILL_AFTER_S}s"]
        command = [*limit, f"{job.time_limit_s:g}s", *command]
    return f'{shlex.join(command)}\ncode=$?\necho "{EXIT_LINE}$code"\nexit $code\n'
