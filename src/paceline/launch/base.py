"""The interface of clusters: a `Launcher` hands a training over, as a `SubmittedJob`.

`follow.py` is all that calls them: it owns output, signals, detaching and the exit code.
`registry.py` lists the implementations; docs/internals/add-a-launcher.md shows how to add one.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from paceline.errors import InfrastructureError
from paceline.launch.cluster import ClusterJob
from paceline.launch.signals import StopRequests
from paceline.options.text import clause


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a job ended."""

    code: int
    """Exit code for the command that follows it (see `errors.ExitCode`)."""
    reason: str = ""
    """Why, for the user; empty where the training's own output has said it. Where the code is 0,
    where the results are."""
    details: str = ""
    """What else belongs to it, such as the last lines of a node that isn't followed."""


class JobLostError(InfrastructureError):
    """A job can't be followed any further, and asking again doesn't help."""


class SubmittedJob(ABC):
    """A job that a cluster has: running, waiting or ended. For one thread; no call waits long."""

    patience_s = 300.0
    """Seconds for which the cluster may fail to answer: the job runs on meanwhile."""
    stop_limit_s = 600.0
    """Seconds that the job may take to end, once it was asked to."""

    def __init__(self, name: str, stop_command: str, after_detaching: str | None = "") -> None:
        """Store how the job is named in messages.

        Args:
            name: By which users of the cluster know it, such as `job/paceline-digits-3fa9c`.
            stop_command: For a shell: ends it, should this process be gone.
            after_detaching: What `--detach` prints: how to look at it and end it. None: its
                submission isn't over yet, so that it is followed to its end with --detach as well.
        """
        self.name = name
        self.stop_command = stop_command
        self.after_detaching = after_detaching

    @property
    @abstractmethod
    def poll_s(self) -> float:
        """Seconds between two calls of `poll`, a class attribute where that never changes."""

    def lost(self, why: str) -> JobLostError:
        """Make the error of a job that may run on: what happened, and how to end it by hand."""
        return JobLostError(
            f"{clause(why)}. {self.name} may still run, and cost. Look, and end it: "
            f"{self.stop_command}"
        )

    @abstractmethod
    def poll(self) -> str | Outcome:
        """Ask how it is: at first, every `poll_s`, and after each call of `stop` and `cancel`.

        Returns:
            What it does or waits for, shown where it has changed (empty: nothing to say); or how it
            ended. Not called again after that.

        Raises:
            InfrastructureError: The cluster doesn't answer. Asked again for `patience_s`.
            JobLostError: It can't be followed any further.
        """

    @abstractmethod
    def logs(self) -> str | None:
        """Give what it has printed since the last call; called several times a second.

        Returns:
            Text, empty where nothing is new; after its end None, once there will be no more.

        Raises:
            InfrastructureError: As for `poll`.
        """

    @abstractmethod
    def stop(self) -> None:
        """Ask for its end, with a snapshot; `poll` tells when it has come. Called at most once.

        Raises:
            InfrastructureError: It couldn't be asked.
        """

    @abstractmethod
    def cancel(self) -> Outcome | None:
        """End it at once, after `stop`: the user has asked a second time.

        Returns:
            None where `poll` will tell its end; an outcome where nothing is waited for any more.

        Raises:
            JobLostError: There is no faster way; it may run on.
        """

    @abstractmethod
    def resume_hint(self) -> str:
        """Say how to resume it from its newest snapshot; empty for nothing to say."""

    @abstractmethod
    def close(self) -> None:
        """End what runs here, not the job. Called once, in any case."""


class Launcher(ABC):
    """One kind of cluster, with the options that its dataclass gives it."""

    hangup_stops = True
    """Whether SIGHUP, a closed terminal, stops the job as Ctrl-C does; else the command ends and
    the job runs on."""

    @abstractmethod
    def render(self, job: ClusterJob) -> str:
        """Write what `submit` would hand over, for `--dry-run`. Asks no cluster.

        Raises:
            UsageError: Something is missing, or can't go together.
        """

    @abstractmethod
    def submit(self, job: ClusterJob, stop: StopRequests) -> SubmittedJob:
        """Hand a training over, and say so on standard output; leave nothing behind on failure.

        Args:
            job: The training.
            stop: `stop.check()` raises where the user has asked to stop: for between two steps.

        Raises:
            UsageError: As `render`; or the cluster's program isn't here, or refuses the job.
            InfrastructureError: The cluster failed, or can't be reached.
        """
