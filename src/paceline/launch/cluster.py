"""A training that a cluster is to start: what every kind of cluster needs to know of it."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from paceline.options.durations import parse_duration_s
from paceline.options.fields import check_at_least


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """What to ask of a cluster, whatever its kind."""

    nodes: int = 1
    """Nodes to ask for; --workers is then the number of workers on each of them."""

    gpus_per_node: int | None = None
    """GPUs to ask for on each node, one worker each unless --workers says otherwise. Default: none,
    or those that the instance type has."""

    time_limit: None | str = None  # noqa: RUF036  # the first type that fits is taken
    """How long the cluster lets the job run, such as 12h. The training stops in time before, with a
    snapshot. Default: the cluster's own limit."""

    job_name: str | None = None
    """The job's name. Default: paceline- and the recipe's name."""

    image: str | None = None
    """Container image to run in, with PyTorch in it."""

    detach: bool = False
    """Return once the job is submitted, instead of following it to its end."""

    dry_run: bool = False
    """Print what would be started or submitted (settings, steps an epoch, memory, workers), and
    start nothing."""

    resume: bool = False
    """Resume the training that the run directory holds already, where the nodes see it."""

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            UsageError: A count is out of range, or the time limit can't be read.
        """
        check_at_least(self, nodes=1, gpus_per_node=0)
        if self.time_limit is not None:
            parse_duration_s(self.time_limit, "--time-limit")


@dataclass(frozen=True, kw_only=True)
class ClusterJob:
    """One training, as it is handed to a cluster."""

    command: tuple[str, ...]
    """What every node (or every worker, where the cluster starts them) runs: the words of a
    `paceline` command, without the options that chose the cluster."""
    name: str
    nodes: int
    workers: int | None
    """On each node; None: one per GPU, or what the node's Paceline chooses."""
    gpus_per_node: int | None
    time_limit_s: float | None
    image: str | None
    detach: bool
    dry_run: bool
    max_restarts: int
    """How often the cluster may start the training again after a failure of infrastructure."""
    directory: Path
    """The working directory, absolute."""
    run_dir: str
    """As the command has it: relative to the working directory, or absolute."""
    shared: bool = False
    """Whether others may read the run directory, where it is made before the command runs."""
    resume: bool = False
    """Resume what the run directory holds, if it holds a training."""


def environment_for(environment: Mapping[str, str], options: type) -> dict[str, str]:
    """Give the environment of a job that inherits this process's.

    Without the options that chose the cluster: the nodes would submit the training themselves.

    Args:
        options: The dataclass of the launcher's options.
    """
    launcher_options = {
        option.name for part in (ClusterOptions, options) for option in fields(part)
    }
    dropped = {
        f"PACELINE_{name.upper()}" for name in (*launcher_options, "on", "workers", "max_restarts")
    }
    return {name: value for name, value in environment.items() if name not in dropped}
