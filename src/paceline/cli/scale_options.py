"""What a command line of `paceline scale` asks for, checked before anything is trained."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from paceline.cli.scale_commands import ONLY_TRAINED, StudyCommands, fills, usual_method
from paceline.cli.train import file_name
from paceline.data.options import DEFAULT_GLOBAL_BATCH
from paceline.errors import UsageError
from paceline.gradient_sync.options import SyncMethod
from paceline.launch.ssh.hostfile import Host
from paceline.launch.ssh.options import HostsOptions
from paceline.launch.worker_count import check_machine, usable_cores
from paceline.options.command_line import (
    flag,
    parse_options,
    part_script_args,
    refuse_script_args,
    show_help,
    take_word,
    wants_help,
)
from paceline.options.command_line import with_defaults as shown_with
from paceline.options.config_file import CONFIG
from paceline.options.fields import OptionField, OptionValue, option_fields
from paceline.options.shell import command_line
from paceline.recipes.registry import reference_of
from paceline.runtime.placement import check_workers, count_gpus
from paceline.runtime.script_options import script_options
from paceline.scaling.options import (
    ScaleOptions,
    parse_methods,
    parse_workers,
    usual_workers,
)
from paceline.scaling.plan import (
    METHOD_OPTIONS,
    Measurement,
    Size,
    global_batch_of,
    make_plan,
    make_sizes,
    method_settings,
    refuse_without_effect,
)
from paceline.scaling.study_directory import OF_TRAINED, StudyDirectory
from paceline.training.config import TrainConfig, merge, training_options
from paceline.training.recipe import Recipe, load_recipe

USAGE = "paceline scale RECIPE|SCRIPT.py [options] [-- the script's own arguments]"
ABOUT = (
    "Measure how a training scales: short trainings on 1, 2, 4 ... workers, here or on hosts, in "
    "turns. Says images/s and efficiency against the best run of one worker, and where the time of "
    "a step and of an epoch goes; writes study.json, study.csv and report.html. Ctrl-C keeps what "
    "is measured; the same command with --study-dir resumes it."
)
_NOT_OURS = {
    "workers",
    "sync",
    "max_restarts",
    "on",
    "rank",
    "world_size",
    "local_rank",
    "init_method",
    "name",
    "tag",
    "note",
}
"""Options of training that the study settles, or that name a run."""
_HOSTS = tuple(o for o in option_fields(HostsOptions, "Hosts") if o.name != "min_hosts")
_BATCHES = {"weak": "batch_per_worker", "strong": "global_batch"}


@dataclass(frozen=True, kw_only=True)
class ScaleRequest:
    """What the command line says."""

    tokens: tuple[str, ...]
    options: ScaleOptions
    commands: StudyCommands
    sizes: tuple[Size, ...]
    methods: tuple[SyncMethod, ...]
    batch: int | None
    """Of one worker alone; None where a script settles it."""
    place: StudyDirectory
    settled: Mapping[str, object]
    """What must be the same where a study goes on."""

    @property
    def plan(self) -> tuple[Measurement, ...]:
        """What is to be measured, in order."""
        return make_plan(self.sizes, self.options.repeats)


def read(tokens: Sequence[str]) -> ScaleRequest:
    """Read the command line."""
    own, script_args = part_script_args(tokens)
    target, own = take_word(own, USAGE, "what to measure")
    is_script = target.endswith(".py")
    recipe = None if is_script else load_recipe(reference_of(target))
    listed, command = listed_options(recipe, is_script=is_script), command_line("scale", target)
    if wants_help(own):
        show_help(command, ABOUT, listed, own)
    if is_script and not Path(target).expanduser().is_file():
        raise UsageError(f"there is no file {target}")
    refuse_script_args(() if is_script else script_args)
    if any(word == "--sync" or word.startswith("--sync=") for word in own):
        raise UsageError("say --methods, such as allreduce,local: several can be measured")
    given = parse_options(command, ABOUT, own, listed)
    given.pop("config", None)
    study = {f.name: given.pop(f.name) for f in fields(ScaleOptions) if f.name in given}
    options = ScaleOptions(**study)  # type: ignore[arg-type]  # checked by parsing
    return _build_request(tuple(tokens), target, options, given, recipe, script_args)


def listed_options(recipe: Recipe | None, *, is_script: bool) -> list[OptionField]:
    """List the options of the study, of hosts, and of training.

    Args:
        recipe: Whose arguments and defaults are shown, if it is known.
        is_script: Whether the training is a script, which has fewer.
    """
    study = option_fields(ScaleOptions, "Study")
    training = of_training(recipe, is_script=is_script, without=_NOT_OURS)
    return [*study, CONFIG, *_HOSTS, *training]


def of_training(
    recipe: Recipe | None, *, is_script: bool, without: Collection[str]
) -> list[OptionField]:
    """List the options of the training that a command starts.

    Args:
        recipe: Whose arguments and defaults are shown, if it is known.
        is_script: Whether the training is a script, which has fewer.
        without: Names of those that the command settles.
    """
    every = script_options() if is_script else training_options()
    options = {name: option for name, option in every.items() if name not in without}
    if recipe is None:
        return list(options.values())
    return [*recipe.arguments(), *shown_with(options, recipe.settings)]


def _build_request(
    tokens: tuple[str, ...],
    target: str,
    options: ScaleOptions,
    given: dict[str, OptionValue],
    recipe: Recipe | None,
    script_args: tuple[str, ...],
) -> ScaleRequest:
    """Settle what follows from the command line.

    Raises:
        UsageError: Something in it can't be.
    """
    # Where: the hosts.
    hosts_given = {o.name: given.pop(o.name) for o in _HOSTS if o.name in given}
    hosts = HostsOptions(**hosts_given).read()  # type: ignore[arg-type]  # checked by parsing
    if hosts_given and not hosts:
        raise UsageError(f"{flag(next(iter(hosts_given)))} has no effect without --hosts")
    # What: methods, numbers of workers and their sizes.
    settings = recipe.settings if recipe else {}
    methods = parse_methods(options.methods) or (usual_method(given, settings),)
    refuse_without_effect(methods, tuple(given))
    workers = parse_workers(options.workers) or usual_workers(_most_workers(hosts, given))
    if not hosts:
        check_machine(max(workers))
    sizes = make_sizes(workers, methods, hosts)
    _check(options, given, script_args, is_script=recipe is None)
    # How each is run, and where the results go.
    reach = ("hosts", "hostfile")
    name = file_name(Path(target).stem if recipe is None else target)
    place = StudyDirectory.of(options.study_dir, f"scale-{name}")
    of_methods = {n: v for n, v in given.items() if n in METHOD_OPTIONS}
    commands = StudyCommands(
        target=target,
        is_script=recipe is None,
        given={n: v for n, v in given.items() if n not in METHOD_OPTIONS},
        methods=of_methods,
        names_method=recipe is not None or options.methods is not None or bool(of_methods),
        hosts=hosts,
        hosts_given={n: v for n, v in hosts_given.items() if n not in reach},
        hostfiles=place.path / "hosts",
        seconds=options.seconds,
        script_args=script_args,
    )
    request = ScaleRequest(
        tokens=tokens,
        options=options,
        commands=commands,
        sizes=sizes,
        methods=methods,
        batch=_batch(options, given, settings, is_script=recipe is None),
        place=place,
        settled=_settled(options, commands, hosts, given),
    )
    if recipe is not None:
        _check_recipe(request, recipe)
    return request


def _most_workers(hosts: Sequence[Host], given: Mapping[str, OptionValue]) -> int:
    """Count the workers that there is room for."""
    if hosts:
        return sum(host.slots or 1 for host in hosts)
    return _gpus(given) or usable_cores()


def _gpus(given: Mapping[str, OptionValue]) -> int:
    return count_gpus(str(given.get("device", "auto")), str(given.get("backend", "auto")))


def _batch(
    options: ScaleOptions,
    given: Mapping[str, OptionValue],
    recipe: Mapping[str, OptionValue],
    *,
    is_script: bool,
) -> int | None:
    """Settle the batch of one worker alone; None where a script does."""
    name = _BATCHES[options.mode]
    other = next(n for n in _BATCHES.values() if n != name)
    size = given.get(name)
    if size is None and not is_script:
        size = recipe.get(name) or recipe.get(other) or DEFAULT_GLOBAL_BATCH
    return size if isinstance(size, int) else None


def _check(
    options: ScaleOptions,
    given: Mapping[str, OptionValue],
    script_args: Sequence[str],
    *,
    is_script: bool,
) -> None:
    """Refuse what would be ignored, or would fail after minutes only.

    Raises:
        UsageError: There is such a thing.
    """
    name = _BATCHES[options.mode]
    for mode, other in _BATCHES.items():
        if mode != options.mode and other in given:
            raise UsageError(
                f"{flag(other)} is for --mode {mode}; --mode {options.mode} takes {flag(name)}"
            )
    if fills(script_args) and name not in given:
        raise UsageError(f"{{global_batch}} in the script's arguments needs {flag(name)}")
    idle = [n for n in given if n in ONLY_TRAINED and not (is_script and n == "epochs")]
    if idle and not options.train:
        raise UsageError(
            f"{flag(idle[0])} has no effect without --train: a measurement lasts --seconds"
        )


def _check_recipe(request: ScaleRequest, recipe: Recipe) -> None:
    """Check each size's settings before anything is trained.

    Raises:
        UsageError: One can't be.
    """
    commands, gpus = request.commands, _gpus(request.commands.given)
    most = max(size.workers for size in request.sizes)
    if gpus and not commands.hosts and most > gpus:
        raise UsageError(
            f"--workers says {most}, and there are {gpus} GPUs here (one worker uses one). Give "
            "--hosts, or --device cpu"
        )
    arguments = {argument.name for argument in recipe.arguments()}
    own = {n: v for n, v in commands.given.items() if n not in arguments}
    for size in request.sizes:
        batch = global_batch_of(request.options.mode, request.batch or 1, size.workers)
        method = method_settings(size.method, commands.methods, warm=True)
        sized = own | {"global_batch": batch, "batch_per_worker": None} | method
        # With --train both are run: measurements without a time budget, whole trainings with it.
        for ends in (
            ({"time_budget": None}, {}) if request.options.train else ({"time_budget": None},)
        ):
            settings = merge(sized | ends, recipe.settings)
            check_workers(TrainConfig.from_settings(settings), size.workers)


def _settled(
    options: ScaleOptions,
    commands: StudyCommands,
    hosts: Sequence[Host],
    given: Mapping[str, OptionValue],
) -> Mapping[str, object]:
    ends = {flag(n): v for n, v in given.items() if n in ONLY_TRAINED}
    content = {
        "recipe or script": commands.target,
        "--mode": options.mode,
        "--seconds": options.seconds,
        "hosts": [f"{host.name}:{host.slots}" for host in hosts],
        "the script's arguments": list(commands.script_args),
        **{flag(n): v for n, v in given.items() if n not in ONLY_TRAINED},
        OF_TRAINED: ends if options.train else None,
    }
    # As it comes back from the study's file, with which it is compared.
    plain: Mapping[str, object] = json.loads(json.dumps(content, default=str))  # paths
    return plain
