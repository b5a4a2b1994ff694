"""Options that send a training elsewhere: to hosts by ssh, or to a cluster that starts it."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import datetime
from functools import cache
from pathlib import Path

from paceline.errors import UsageError
from paceline.launch.cluster import ClusterJob, ClusterOptions
from paceline.launch.follow import launch
from paceline.launch.registry import launchers
from paceline.launch.ssh.options import HostsOptions
from paceline.options.command_line import flag
from paceline.options.durations import parse_duration_s
from paceline.options.fields import OptionField, OptionValue, option_fields, pick
from paceline.results.run_directory import USUAL_FOLDER, usual_name
from paceline.training.config import TrainConfig, training_options

_SHARED = ("tag",)
"""Options of the training that a launcher may have as well: tags of its service."""


@dataclass(frozen=True, kw_only=True)
class ClusterChoice:
    """What the command line says about where a training runs."""

    hosts: HostsOptions
    cluster: ClusterOptions
    given: Mapping[str, OptionValue]
    """Of these options, what was given."""

    def check(self, on: str) -> None:
        """Refuse options that mean nothing for where the training goes.

        Raises:
            UsageError: Such an option was given.
        """
        if on in launchers() and self.hosts.named:
            raise UsageError(f"--on {on} and --hosts can't be combined")
        useful = {field.name for field in fields(HostsOptions)} if self.hosts.named else set()
        useful |= {"dry_run"}
        if on in launchers():
            useful = {field.name for field in fields(ClusterOptions)}
            useful |= {option.name for option in _own_options(on)}
        for name in self.given:
            if name not in useful:
                here = "; here `paceline resume` resumes a training" if name == "resume" else ""
                raise UsageError(f"{flag(name)} has no effect without {_needed(name)}{here}")

    def plans_alone(self, on: str) -> bool:
        """Tell whether `--dry-run` was given for a training that no cluster is to start."""
        return self.cluster.dry_run and on not in launchers()


@cache
def cluster_options() -> tuple[OptionField, ...]:
    """List the options, by heading.

    Raises:
        UsageError: Another package's launcher has an option whose name is taken.
    """
    listed = [*option_fields(HostsOptions, "Hosts"), *option_fields(ClusterOptions, "Cluster")]
    for kind in launchers():
        reserved = {*training_options(), *(option.name for option in listed)}
        for option in _own_options(kind):
            if option.name in reserved:
                raise UsageError(
                    f"the launcher {kind!r} has the option {flag(option.name)}, a name that is "
                    "taken: uninstall its package"
                )
            listed.append(option)
    hidden = {option.name: replace(option, is_basic=False) for option in listed}
    hidden["dry_run"] = replace(hidden["dry_run"], is_basic=True, group="Output")  # for all
    return tuple(hidden.values())


def take_cluster_choice(given: dict[str, OptionValue]) -> ClusterChoice:
    """Split the options of hosts and clusters off the others.

    Raises:
        UsageError: A value is out of range.
    """
    names = {option.name for option in cluster_options()}
    own = {name: given.pop(name) for name in list(given) if name in names}
    return ClusterChoice(
        hosts=pick(HostsOptions, own), cluster=pick(ClusterOptions, own), given=own
    )


def submit(
    elsewhere: ClusterChoice, config: TrainConfig, command: tuple[str, ...], name: str, run_dir: str
) -> int:
    """Hand a training to the cluster that `--on` names. Returns the exit code.

    Args:
        command: Words of the command that is to run there.
        name: Of the recipe or script, fit for a file's name.
    """
    elsewhere.check(config.launch.on)
    options = elsewhere.cluster
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
    entry = launchers()[config.launch.on]
    # A service's tags have values: the others are the run's alone.
    shared = {"tag": tuple(tag for tag in config.metrics.tag if "=" in tag)}
    return launch(entry.make(pick(entry.options_class(), {**elsewhere.given, **shared})), job)


def run_dir_there(name: str) -> str:
    """Name a run directory for a training elsewhere: below the working directory that it has there.

    What is there can't be seen from here: four random digits make the name one of its own.
    """
    return f"{USUAL_FOLDER}/{usual_name(name, datetime.now())}-{secrets.token_hex(2)}"


def _own_options(kind: str) -> tuple[OptionField, ...]:
    """List a launcher's options, without those that it shares with the training."""
    entry = launchers()[kind]
    listed = option_fields(entry.options_class(), entry.heading)
    return tuple(option for option in listed if option.name not in _SHARED)


def _needed(name: str) -> str:
    if name in {field.name for field in fields(HostsOptions)}:
        return "--hosts or --hostfile"
    for kind in launchers():
        if name in {option.name for option in _own_options(kind)}:
            return f"--on {kind}"
    *names, last = launchers()
    return f"--on {', '.join(names)} or {last}"
