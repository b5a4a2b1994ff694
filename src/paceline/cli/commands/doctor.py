"""`paceline doctor`: what would stop or slow a training, on this machine or on several hosts."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.commands.train import RUN_DIR, read_recipe_options
from paceline.distributed.environment import read_environment
from paceline.distributed.options import DistOptions
from paceline.errors import ExitCode, UsageError
from paceline.launch.ssh.options import HostsOptions
from paceline.options.command_line import (
    names_something,
    note,
    read_options,
    show_help,
    wants_help,
)
from paceline.options.fields import OptionField, OptionValue, option_fields, pick
from paceline.options.shell import command_line
from paceline.options.text import printable
from paceline.recipes.registry import reference_of
from paceline.results.run_directory import USUAL_FOLDER
from paceline.training.config import TrainConfig, merge, training_options
from paceline.training.recipe import Recipe, absolute_reference, load_recipe

if TYPE_CHECKING:
    from paceline.doctor.diagnosis import Diagnosis, DiagnosisRequest

_COMMAND = "paceline doctor"
_ABOUT = (
    "Find what would stop or slow a training: on this machine, or on those that --hosts or "
    "--hostfile names and on all links between them. With a recipe its data is compared as well. "
    "Each line is ok, a warning or a fault with its remedy. Exit code 65: there is a fault; 70: a "
    "host can't be reached. With --here: what a worker started by this shell would find."
)
_OF_HOSTS = tuple(
    option
    for option in option_fields(HostsOptions, "Hosts")
    if option.name in ("hosts", "hostfile", "host_keys", "ssh_config")
)
_OF_TRAINING = ("loader_workers", "workers", *(field.name for field in fields(DistOptions)))


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """What is examined, and how it is shown."""

    here: bool = False
    """Examine this process's environment alone: who it is among workers, where they meet."""
    json: bool = False
    """Print JSON: findings, hosts, links and all_reduce; with --here a list of findings."""


_OPTIONS = (*option_fields(DoctorOptions, "Doctor"), *_OF_HOSTS, RUN_DIR)


@dataclass(frozen=True, kw_only=True)
class _DoctorRequest:
    given: Mapping[str, OptionValue]
    config: TrainConfig
    recipe: Mapping[str, object] | None
    """A `DataRequest` of `doctor/probes/storage.py`, as JSON."""

    @property
    def own(self) -> DoctorOptions:
        """The command's own options."""
        return pick(DoctorOptions, self.given)

    def hosts_options(self) -> HostsOptions:
        """Give the options of hosts alone."""
        return pick(HostsOptions, self.given)


def main(tokens: Sequence[str]) -> int:
    """Run the command."""
    named = tokens[0] if names_something(tokens) else None
    if named is None and wants_help(tokens):
        show_help(_COMMAND, _ABOUT, [*_OPTIONS, *_training()], tokens)
    request = _read(tokens) if named is None else _read_recipe(named, tokens[1:])
    hosts = request.hosts_options()
    if request.own.here:
        if hosts.named or named is not None:
            raise UsageError("--here looks at this process alone: leave out hosts and recipe")
        return _examine_here(request)
    return _examine(request, hosts)


def _training() -> list[OptionField]:
    """List the options of training that count without a recipe."""
    return [option for name, option in training_options().items() if name in _OF_TRAINING]


def _read(tokens: Sequence[str]) -> _DoctorRequest:
    given = read_options(_COMMAND, _ABOUT, tokens, [*_OPTIONS, *_training()]).values
    settings = {name: value for name, value in given.items() if name in _OF_TRAINING}
    return _DoctorRequest(given=given, config=TrainConfig.from_settings(settings), recipe=None)


def _read_recipe(name: str, tokens: Sequence[str]) -> _DoctorRequest:
    recipe = load_recipe(reference_of(name))
    given = read_recipe_options(command_line("doctor", name), recipe, tokens, _OPTIONS).values
    settings = {n: v for n, v in given.items() if n in training_options()}
    config = TrainConfig.from_settings(merge(settings, recipe.settings))
    return _DoctorRequest(given=given, config=config, recipe=_data_of(name, recipe, given, config))


def _data_of(
    name: str, recipe: Recipe, given: Mapping[str, OptionValue], config: TrainConfig
) -> Mapping[str, object]:
    """Say whose data is meant; paths below the working directory from there."""
    own = {argument.name for argument in recipe.arguments()}
    arguments = recipe.resolved({n: v for n, v in given.items() if n in own})
    paths = recipe.path_arguments()
    return {
        "reference": _from_here(absolute_reference(reference_of(name))),
        "arguments": {
            n: _from_here(v) if n in paths and isinstance(v, str) else v
            for n, v in arguments.items()
        },
        "seed": config.loop.seed,
    }


def _from_here(path: str) -> str:
    return path.removeprefix(f"{Path.cwd()}/")


def _examine_here(request: _DoctorRequest) -> int:
    from paceline.distributed.environment_check import examine

    findings = examine(read_environment(), request.config.dist)
    if request.own.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        print(printable("\n".join(f"{f.state:8}{f.what:11} {f.text}" for f in findings)))
    faulty = any(finding.state == "fault" for finding in findings)
    return ExitCode.JOB if faulty else ExitCode.DONE


def _examine(request: _DoctorRequest, hosts: HostsOptions) -> int:
    from paceline.doctor.diagnosis import as_json
    from paceline.doctor.text_report import as_text

    diagnosis = _diagnose(request, hosts)
    print(
        json.dumps(as_json(diagnosis), indent=2)
        if request.own.json
        else printable(as_text(diagnosis))
    )
    return diagnosis.exit_code


def _diagnose(request: _DoctorRequest, options: HostsOptions) -> "Diagnosis":
    from paceline.doctor.runner import TrainingPlace, examine_here, examine_hosts

    run_dir = request.given.get("run_dir")
    runs = Path(str(run_dir)).parent if run_dir is not None else USUAL_FOLDER
    place = TrainingPlace(directory=str(Path.cwd()), runs=str(runs))
    if not options.named:
        return examine_here(_diagnosis_request(request), place, request.config.launch.workers, note)
    return examine_hosts(options.read(), options, _diagnosis_request(request), place, note)


def _diagnosis_request(request: _DoctorRequest) -> "DiagnosisRequest":
    from paceline.doctor.diagnosis import DiagnosisRequest

    config = request.config
    return DiagnosisRequest(
        on_gpus=config.dist.device != "cpu" and config.dist.backend != "gloo",
        interface=config.dist.interface,
        loader_workers=config.data.loader_workers,
        recipe=request.recipe,
    )
