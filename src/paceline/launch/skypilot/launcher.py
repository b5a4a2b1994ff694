"""`--on skypilot`: a training on machines that SkyPilot rents, on whatever cloud."""

import re
import secrets
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import final

from paceline.errors import ExitCode, UsageError
from paceline.launch.base import Launcher, Outcome, SubmittedJob
from paceline.launch.child_command import ChildCommand
from paceline.launch.cluster import ClusterJob
from paceline.launch.node_command import exit_code_of_nodes, how_to_resume, label
from paceline.launch.scratch import own_directory
from paceline.launch.signals import StopRequests
from paceline.launch.skypilot.options import SkypilotOptions
from paceline.launch.skypilot.task import EXIT_LINE, run_dir, task
from paceline.launch.yaml_text import to_yaml

_MAX_NAME_LENGTH = 30
_EXITED = re.compile(re.escape(EXIT_LINE) + r"(\d+)")


@final
class SkypilotLauncher(Launcher):
    """Has SkyPilot rent machines and run a task on them."""

    def __init__(self, options: SkypilotOptions) -> None:
        self._options = options

    def render(self, job: ClusterJob) -> str:
        """Write the task file."""
        own = secrets.token_hex(3)
        return to_yaml(task(job, self._options, label(job.name, own, _MAX_NAME_LENGTH), own))

    def submit(self, job: ClusterJob, stop: StopRequests) -> "SkypilotJob":
        """Start SkyPilot's command, which submits the task and shows its output."""
        own = secrets.token_hex(3)
        name = label(job.name, own, _MAX_NAME_LENGTH)
        written = to_yaml(task(job, self._options, name, own))
        return SkypilotJob(find_sky(), job, self._options, name, written)


@final
class SkypilotJob(SubmittedJob):
    """A `sky` command that runs, from the first machine that is rented to the training's end."""

    poll_s = 0.0  # a local process is polled, not a service
    stop_limit_s = 300.0

    def __init__(
        self, sky: str, job: ClusterJob, options: SkypilotOptions, name: str, written: str
    ) -> None:
        """Start the command."""
        down = "jobs cancel -n" if options.use_spot else "down"
        super().__init__(name, f"sky {down} {name}", after_detaching=None)
        self._sky = sky
        self._job = job
        self._options = options
        self._directory = TemporaryDirectory(dir=own_directory())
        path = Path(self._directory.name, f"{name}.yaml")
        path.write_text(written)
        self._launch = ChildCommand([sky, *launch_command(job, options, name, path)], is_read=True)
        self._cancellation: ChildCommand | None = None
        self._is_read = False
        self._line = ""
        self._codes: list[int] = []

    def poll(self) -> str | Outcome:
        """Look whether the command has ended, or that which cancels the task."""
        # While it is cancelled only that command counts.
        if self._cancellation is not None and self._cancellation.code is not None:
            if self._cancellation.code:
                raise self.lost("the task couldn't be cancelled")
            return Outcome(code=ExitCode.RESUMABLE, reason="it was cancelled")
        # The exit code counts once all output has been read: the nodes' codes stand in it.
        code = self._launch.code
        if self._cancellation is not None or code is None or not self._is_read:
            return ""
        if code == 0:
            return Outcome(code=ExitCode.DONE)
        codes = {code for code in self._codes if code}  # of all attempts: one may have succeeded
        return Outcome(code=exit_code_of_nodes(codes), reason=f"sky ended with exit code {code}")

    def logs(self) -> str | None:
        """Give what SkyPilot prints, and note the nodes' exit codes in it."""
        text = None if self._is_read else self._launch.read()
        if text is None:
            self._is_read = True
            return None
        # A line may come in pieces: the last one waits for its end.
        *lines, self._line = (self._line + text).split("\n")
        self._codes += [int(match[1]) for line in lines if (match := _EXITED.search(line))]
        return text

    def stop(self) -> None:
        """Have SkyPilot cancel the task."""
        command = cancel_command(self._options, self.name)
        self._cancellation = ChildCommand([self._sky, *command])

    def cancel(self) -> Outcome | None:
        """SkyPilot has no faster way."""
        raise self.lost("not waiting any longer")

    def resume_hint(self) -> str:
        """Give the options, where a bucket has kept the run directory."""
        if self._options.keep_in is None:
            return "There was no --keep-in: the run directory is on the machines alone"
        return how_to_resume(run_dir(self._job, self._options))

    def close(self) -> None:
        """End the commands, if they still run; the training goes on or not."""
        for command in filter(None, (self._launch, self._cancellation)):
            command.end()
        self._directory.cleanup()


def launch_command(job: ClusterJob, options: SkypilotOptions, name: str, path: Path) -> list[str]:
    """Write SkyPilot's command after `sky`: a managed job where machines may be taken away."""
    command = ["jobs", "launch", "-n", name] if options.use_spot else ["launch", "-c", name]
    return [*command, "--yes", *(["--detach-run"] if job.detach else []), str(path)]


def cancel_command(options: SkypilotOptions, name: str) -> list[str]:
    """Write the command after `sky` that stops the training."""
    if options.use_spot:
        return ["jobs", "cancel", "--yes", "-n", name]
    return ["cancel", "--yes", "--all", name]


def find_sky() -> str:
    """Find SkyPilot's command.

    Raises:
        UsageError: It isn't installed.
    """
    program = shutil.which("sky")
    if program is None:
        raise UsageError(
            "--on skypilot needs SkyPilot, whose command `sky` isn't on the PATH: pip install "
            "'skypilot[aws]' (or your cloud); or print the task file with --dry-run"
        )
    return program
