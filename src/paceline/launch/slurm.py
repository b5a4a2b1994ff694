"""`--on slurm`: a batch script that starts `paceline` on each node, and requeues its job."""

import math
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from paceline.errors import ExitCode, UsageError
from paceline.launch.base import Launcher, Rendered, run_tool
from paceline.launch.cluster import ClusterJob, Manifest, merged

_SCRIPT = """\
#!/bin/bash
{directives}

# What the workers print is shown at once. Newer versions of srun ignore sbatch's --cpus-per-task.
export PYTHONUNBUFFERED=1 SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
# All options stand in the command: none is taken from the environment.
unset "${{!PACELINE_@}}"
# SIGTERM, before the time limit or a preemption, is for the nodes: they write a snapshot.
trap : TERM

srun --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=60 \\
  {command}
code=$?

# Queue the job again where it was stopped ({resumable}), or where the infrastructure failed
# ({retried} and more, such as signals), {max_restarts} times; not where Slurm is ending it.
again=
[ $code -eq {resumable} ] && again=1
[ $code -ge {retried} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {max_restarts} ] && again=1
state=$(squeue --noheader --format=%T --jobs="$SLURM_JOB_ID")
[ "$again" ] && [ "$state" = RUNNING ] && scontrol requeue "$SLURM_JOB_ID"
exit $code
"""


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """What to ask of Slurm."""

    partition: str | None = None
    """Partition to submit to. Default: the cluster's."""

    account: str | None = None
    """Account that pays."""


@final
class SlurmLauncher(Launcher):
    """Renders a batch script, and submits it with `sbatch`."""

    shares_files = True

    def __init__(self, options: SlurmOptions) -> None:
        self._options = options

    def render(self, job: ClusterJob) -> Rendered:
        """Return the script."""
        if job.image is not None:
            raise UsageError(
                "--image has no effect with --on slurm. Where the cluster starts containers, write "
                f"`container-image: {job.image}` into the file of --job-patch"
            )
        directives = merged(sbatch_options(job, self._options), job.patch)
        assert isinstance(directives, Mapping)
        words = (sys.executable, "-P", "-m", "paceline", *job.words(job.run_dir, "--on", "node"))
        script = _SCRIPT.format(
            directives="\n".join(
                _directive(name, value) for name, value in directives.items() if value is not False
            ),
            command=shlex.join(words),
            resumable=int(ExitCode.RESUMABLE),
            retried=int(ExitCode.INFRASTRUCTURE),
            max_restarts=job.max_restarts,
        )
        path = job.folder / "slurm.sh"
        return Rendered(
            files={path.name: script},
            submit=("sbatch", str(path)),
            follow=shlex.join(("tail", "-F", str(job.folder / "slurm.log"))),
            stop="scancel NUMBER (which sbatch prints)",
        )

    def submit(self, rendered: Rendered) -> None:
        """Submit the script."""
        run_tool(rendered.submit)


def sbatch_options(job: ClusterJob, options: SlurmOptions) -> Manifest:
    """Return sbatch's options by name. `%` has a meaning in the name of the output's file."""
    wanted: Manifest = {
        "job-name": job.name,
        "partition": options.partition,
        "account": options.account,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": job.workers or job.gpus_per_node or 1,
        "gpus-per-node": job.gpus_per_node or None,
        "time": None if job.time_limit_s is None else math.ceil(job.time_limit_s / 60),
        "signal": "TERM@120",  # without `B:` it goes to the nodes, and not to the script
        "requeue": True,
        "chdir": str(job.directory),
        "output": str(job.folder.absolute() / "slurm.log").replace("%", "%%"),
        "open-mode": "append",
    }
    return {name: value for name, value in wanted.items() if value is not None}


def _directive(name: str, value: object) -> str:
    """Return a line of the script; to sbatch, a backslash means something in any quotes.

    Raises:
        UsageError: It would be several lines, or the value isn't a single one.
    """
    if isinstance(value, (Mapping, list)):
        raise UsageError(
            f"--job-patch has {name!r} with several values; for Slurm it is a mapping of sbatch's "
            "options to one value each, such as `constraint: a100`"
        )
    word = f"--{name}" if value is True else f"--{name}={value}"
    if not word.isprintable():
        raise UsageError(f"sbatch can't take {word!r}: it has unprintable characters")
    return f"#SBATCH {shlex.quote(word.replace(chr(92), chr(92) * 2))}"
