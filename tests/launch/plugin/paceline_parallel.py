"""A launcher for Paceline: the nodes of a training as processes of this machine."""

import os
import secrets
import shlex
import signal
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from paceline.launch.base import Launcher, Outcome, SubmittedJob
from paceline.launch.cluster import ClusterJob, environment_for
from paceline.launch.node_command import NodeRun, exit_code_of_nodes, node_command
from paceline.launch.registry import LauncherEntry
from paceline.launch.signals import StopRequests
from paceline.launch.tail import Tail
from paceline.options.shell import command_line

ENTRY = LauncherEntry(
    heading="Parallel",
    options="paceline_parallel:ParallelOptions",
    launcher="paceline_parallel:ParallelLauncher",
)


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """How the processes are started."""

    parallel_python: str = "python3"
    """Interpreter of the nodes, with Paceline in it."""


@final
class ParallelLauncher(Launcher):
    """Starts a process for each node."""

    def __init__(self, options: ParallelOptions) -> None:
        self._options = options

    def render(self, job: ClusterJob) -> str:
        """Write the nodes' command."""
        return f"{shlex.join(self._command(job))}\n"

    def submit(self, job: ClusterJob, stop: StopRequests) -> "ParallelJob":
        """Start the processes, which write to a file each."""
        words = self._command(job)
        here = environment_for(os.environ, ParallelOptions)
        place = {"PET_NNODES": job.nodes, "PET_NPROC_PER_NODE": job.workers or "auto"}
        place |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": free_port()}
        nodes, outputs = [], [job.directory / f"{job.name}-{n}.log" for n in range(job.nodes)]
        for number, path in enumerate(outputs):
            variables = {name: str(value) for name, value in place.items()}
            with path.open("w") as output:
                nodes.append(
                    subprocess.Popen(
                        words,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env=here | variables | {"PET_NODE_RANK": str(number)},
                        cwd=job.directory,
                        start_new_session=True,  # Ctrl-C is for `follow`
                    )
                )
        print(f"Started {job.nodes} processes. Output of rank 0: {outputs[0]}")
        return ParallelJob(job, nodes, outputs[0])

    def _command(self, job: ClusterJob) -> list[str]:
        run = NodeRun(submission=secrets.token_hex(3), run_dir=job.run_dir)
        return node_command(job, run, self._options.parallel_python)


@final
class ParallelJob(SubmittedJob):
    """The processes."""

    poll_s = 0.0  # looking at them is cheap

    def __init__(
        self, job: ClusterJob, nodes: Sequence["subprocess.Popen[bytes]"], output: Path
    ) -> None:
        stop = shlex.join(("kill", *(str(node.pid) for node in nodes)))
        super().__init__(job.name, stop, after_detaching=f"Stop it:  {stop}")
        self._nodes = nodes
        self._tail = Tail(output)
        self._has_ended = False
        self._hint = f"Resume it: {command_line('resume', job.run_dir)}"

    def poll(self) -> str | Outcome:
        """Look whether the processes have ended."""
        codes = [node.poll() for node in self._nodes]
        self._has_ended = None not in codes
        if not self._has_ended:
            return f"{codes.count(None)} of {len(codes)} nodes run"
        return Outcome(code=exit_code_of_nodes(codes), reason=f"exit codes {codes}")

    def logs(self) -> str | None:
        """Give what rank 0's node has written."""
        text = self._tail.read(whole_lines=not self._has_ended)
        return None if self._has_ended and not text else text

    def stop(self) -> None:
        """Send SIGTERM: the workers write a snapshot."""
        self._send(signal.SIGTERM)

    def cancel(self) -> None:
        """Send SIGKILL."""
        self._send(signal.SIGKILL)

    def resume_hint(self) -> str:
        """Give the command."""
        return self._hint

    def close(self) -> None:
        """Nothing runs here but the job itself."""

    def _send(self, number: signal.Signals) -> None:
        for node in self._nodes:
            if node.poll() is None:
                node.send_signal(number)


def free_port() -> int:
    """Find a port that nobody uses."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
