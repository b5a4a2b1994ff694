"""Options that send a training elsewhere: to hosts by ssh, or to a cluster that starts it."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from functools import cache
from pathlib import Path

from paceline.errors import UsageError
from paceline.launch.cluster import CLUSTERS, ClusterJob, ClusterOptions
from paceline.launch.ssh.options import HostsOptions
from paceline.options.command_line import flag
from paceline.options.durations import parse_duration_s
from paceline.options.fields import OptionField, OptionValue, option_fields
from paceline.training.config import TrainConfig

_SUBMITTERS: Mapping[str, tuple[str, str, str]] = {
    "slurm": ("Slurm", "paceline.launch.slurm", "SlurmOptions"),
    "kubernetes": ("Kubernetes", "paceline.launch.kubernetes", "KubernetesOptions"),
    "skypilot": ("SkyPilot", "paceline.launch.skypilot", "SkypilotOptions"),
    "sagemaker": ("SageMaker", "paceline.launch.sagemaker", "SagemakerOptions"),
}
"""By kind of cluster: heading for `--help`, module, and the name of its dataclass of options."""


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """What was said about where a training is to go."""

    hosts: HostsOptions
    cluster: ClusterOptions
    given: Mapping[str, OptionValue]
    """Of these options, what was given."""

    def check(self, on: str) -> None:
        """Refuse options that mean nothing for where the training goes.

        Args:
            on: `--on`.

        Raises:
            UsageError: Such an option was given.
        """
        if on in CLUSTERS and self.hosts.named:
            raise UsageError(f"--on {on} and --hosts can't be combined")
        useful = {field.name for field in fields(HostsOptions)} if self.hosts.named else set()
        if on in CLUSTERS:
            useful = {field.name for field in fields(ClusterOptions)}
            useful |= {option.name for option in _own_options(on)}
        for name in self.given:
            if name not in useful:
                raise UsageError(f"{flag(name)} has no effect without {_needed(name)}")


@cache
def elsewhere_options() -> tuple[OptionField, ...]:
    """List the options, by heading."""
    listed = [*option_fields(HostsOptions, "Hosts"), *option_fields(ClusterOptions, "Cluster")]
    for kind in _SUBMITTERS:
        listed += _own_options(kind)
    return tuple(listed)


def take_elsewhere(given: dict[str, OptionValue]) -> Elsewhere:
    """Take these options out of what was given.

    Raises:
        UsageError: A value is out of range.
    """
    names = {option.name for option in elsewhere_options()}
    own = {name: given.pop(name) for name in list(given) if name in names}
    return Elsewhere(
        hosts=HostsOptions(**_of(HostsOptions, own)),  # type: ignore[arg-type]  # checked by parsing
        cluster=ClusterOptions(**_of(ClusterOptions, own)),  # type: ignore[arg-type]
        given=own,
    )


def submit(
    elsewhere: Elsewhere, config: TrainConfig, command: tuple[str, ...], name: str, run_dir: str
) -> int:
    """Hand a training to the cluster that `--on` names. Returns the exit code.

    Args:
        elsewhere: What was said about it.
        config: The options of the training.
        command: Words of the command that is to run there.
        name: Of the recipe or script, fit for a file's name.
        run_dir: As the command has it.
    """
    elsewhere.check(config.launch.on)
    options = elsewhere.cluster
    if options.resume and config.launch.on == "slurm":
        raise UsageError("--resume isn't for Slurm, where `paceline resume` sees the run directory")
    submitter = importlib.import_module(f"{_SUBMITTERS[config.launch.on][1]}.submit")
    limit = options.time_limit
    job = ClusterJob(
        command=command,
        name=options.job_name or f"paceline-{name}",
        nodes=options.nodes,
        workers=config.launch.workers,
        gpus_per_node=options.gpus_per_node,
        time_limit_s=None if limit is None else parse_duration_s(limit),
        image=options.image,
        detach=options.detach,
        dry_run=options.dry_run,
        max_restarts=config.launch.max_restarts,
        directory=Path.cwd(),
        run_dir=run_dir,
        shared=config.metrics.share_run_dir,
        resume=options.resume or command[1] == "resume",
    )
    own = _options_class(config.launch.on)
    code: int = submitter.submit(job, own(**_of(own, elsewhere.given)))
    return code


def run_dir_there(name: str) -> str:
    """Name a run directory for a training elsewhere: below the working directory that it has there.

    Args:
        name: Of the training, fit for a directory's name.
    """
    return f"runs/{name}-{datetime.now().astimezone():%Y%m%d-%H%M%S}"


def _own_options(kind: str) -> tuple[OptionField, ...]:
    heading = _SUBMITTERS[kind][0]
    return option_fields(_options_class(kind), heading)


def _options_class(kind: str) -> type:
    _, package, name = _SUBMITTERS[kind]
    found: type = getattr(importlib.import_module(f"{package}.options"), name)
    return found


def _of(component: type, given: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
    names = {option.name for option in option_fields(component, "")}
    return {name: value for name, value in given.items() if name in names}


def _needed(name: str) -> str:
    if name in {field.name for field in fields(HostsOptions)}:
        return "--hosts or --hostfile"
    for kind in _SUBMITTERS:
        if name in {option.name for option in _own_options(kind)}:
            return f"--on {kind}"
    return f"--on {', '.join(CLUSTERS[:-1])} or {CLUSTERS[-1]}"
