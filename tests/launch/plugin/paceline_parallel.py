"""A launcher for Paceline: the nodes of a training as processes of this machine."""

import shlex
from dataclasses import dataclass
from typing import final

from paceline.launch.base import Launcher, Rendered, run_tool
from paceline.launch.cluster import ClusterJob
from paceline.launch.registry import LauncherEntry

ENTRY = LauncherEntry(
    heading="Parallel",
    options="paceline_parallel:ParallelOptions",
    launcher="paceline_parallel:ParallelLauncher",
)


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """How the processes are started."""

    parallel_port: int = 29500
    """Port of this machine at which they meet."""


@final
class ParallelLauncher(Launcher):
    """Starts a process for each node."""

    shares_files = True

    def __init__(self, options: ParallelOptions) -> None:
        self._options = options

    def render(self, job: ClusterJob) -> Rendered:
        """Return a shell script."""
        command = shlex.join(["python3", "-m", "paceline", *job.words(job.run_dir)])
        lines = [
            f"cd {shlex.quote(str(job.directory))}",
            f"export PET_NNODES={job.nodes} PET_MASTER_ADDR=127.0.0.1",
            f"export PET_MASTER_PORT={self._options.parallel_port}",
            *(f"PET_NODE_RANK={node} {command} &" for node in range(job.nodes)),
            "wait",
        ]
        path = job.folder / "parallel.sh"
        return Rendered(
            files={path.name: "\n".join((*lines, ""))},
            submit=("bash", str(path)),
            follow=f"tail -F {job.run_dir}/logs/rank-0.log",
            stop="Ctrl-C",
        )

    def submit(self, rendered: Rendered) -> None:
        """Run the script, in the foreground."""
        run_tool(rendered.submit)
