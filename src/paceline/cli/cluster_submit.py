"""Options that send a training elsewhere: to hosts by ssh, or to a cluster that starts it."""

import secrets
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import datetime
from functools import cache
from math import ceil
from pathlib import Path, PurePosixPath

from paceline.errors import ExitCode, UsageError
from paceline.launch.cluster import ClusterJob, ClusterOptions, read_patch
from paceline.launch.registry import launchers
from paceline.launch.ssh.options import HostsOptions
from paceline.options.command_line import flag
from paceline.options.durations import parse_duration_s
from paceline.options.fields import OptionField, OptionValue, option_fields, pick
from paceline.results.run_directory import USUAL_FOLDER, RunDirectory, usual_name
from paceline.training.config import TrainConfig, training_options


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
        useful |= {"dry_run", "resume"}
        if on in launchers():
            useful = {field.name for field in fields(ClusterOptions)}
            useful |= {option.name for option in _own_options(on)}
        for name in self.given:
            if name not in useful:
                raise UsageError(f"{flag(name)} has no effect without {_needed(name)}")

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


def render(
    elsewhere: ClusterChoice,
    config: TrainConfig,
    command: tuple[str, ...],
    options: tuple[str, ...],
    name: str,
    run_dir: str,
    script_args: tuple[str, ...] = (),
) -> int:
    """Render a training for the cluster that `--on` names, and submit it if asked to.

    Args:
        command: `train` or `run` and what is trained; or `resume`.
        options: Words of the training's options.
        name: Of the recipe or script, fit for a file's name.

    Returns:
        The exit code.
    """
    elsewhere.check(config.launch.on)
    entry, wanted = launchers()[config.launch.on], elsewhere.cluster
    launcher = entry.make(pick(entry.options_class(), elsewhere.given))
    # The files lie in the run directory, or in one of its name where nodes don't share it.
    here = run_dir if launcher.shares_files else USUAL_FOLDER / PurePosixPath(run_dir).name
    run = replace(RunDirectory.named(here), shared=config.metrics.share_run_dir)
    limit = wanted.time_limit
    job = ClusterJob(
        command=command,
        options=options,
        script_args=script_args,
        name=wanted.job_name or f"paceline-{name}",
        nodes=wanted.nodes,
        workers=config.launch.workers,
        gpus_per_node=wanted.gpus_per_node,
        time_limit_s=None if limit is None else ceil(parse_duration_s(limit, "--time-limit")),
        image=wanted.image,
        max_restarts=config.launch.max_restarts,
        directory=Path.cwd(),
        run_dir=str(run.path) if launcher.shares_files else run_dir,
        folder=run.cluster,
        patch=read_patch(wanted.job_patch),
    )
    rendered = launcher.render(job)
    if wanted.dry_run:
        print("".join(rendered.files.values()), end="")
        return ExitCode.DONE
    if launcher.shares_files and not wanted.resume and command[0] != "resume":
        run.refuse_to_overwrite()
    _write(run, rendered.files)
    if wanted.submit:
        launcher.submit(rendered)
    else:
        print(f"Submit:  {shlex.join(rendered.submit)}")
    print(f"Follow:  {rendered.follow}\nStop:    {rendered.stop}")
    return ExitCode.DONE


def _write(run: RunDirectory, files: Mapping[str, str]) -> None:
    """Write what was rendered, and name the files.

    Raises:
        UsageError: They can't be written.
    """
    try:
        for place in (run.path, run.cluster):
            place.mkdir(run.directory_mode, parents=True, exist_ok=True)
        for name, text in files.items():
            (run.cluster / name).write_text(text)
            print(f"Written: {run.cluster / name}")
    except OSError as error:
        raise UsageError(
            f"{run.cluster} can't be written ({error.strerror}). Name another run directory with "
            "--run-dir"
        ) from error


def run_dir_there(name: str) -> str:
    """Name a run directory for a training elsewhere: below the working directory that it has there.

    What is there can't be seen from here: four random digits make the name one of its own.
    """
    return f"{USUAL_FOLDER}/{usual_name(name, datetime.now())}-{secrets.token_hex(2)}"


def _own_options(kind: str) -> tuple[OptionField, ...]:
    """List a launcher's options."""
    entry = launchers()[kind]
    return tuple(option_fields(entry.options_class(), entry.heading))


def _needed(name: str) -> str:
    if name in {field.name for field in fields(HostsOptions)}:
        return "--hosts or --hostfile"
    for kind in launchers():
        if name in {option.name for option in _own_options(kind)}:
            return f"--on {kind}"
    *names, last = launchers()
    return f"--on {', '.join(names)} or {last}"
