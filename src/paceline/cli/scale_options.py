"""What a command line of `paceline scale` asks for, checked before anything is trained."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.cli.target import NOT_OF_TRIALS, Target, list_training_options, parse_with_own
from paceline.data.options import DEFAULT_GLOBAL_BATCH
from paceline.errors import UsageError
from paceline.gradient_sync.options import SyncMethod
from paceline.launch.worker_count import check_machine, usable_cores
from paceline.options.command_line import (
    GivenOptions,
    flag,
    show_help,
    wants_help,
)
from paceline.options.config_file import CONFIG
from paceline.options.fields import OptionField, OptionValue, option_fields
from paceline.options.shell import command_line
from paceline.results.json_object import as_read_back
from paceline.runtime.placement import check_workers, count_gpus
from paceline.scaling.commands import (
    HOSTS,
    ONLY_TRAINED,
    StudyCommands,
    StudyHosts,
    fills,
    idle_without_training,
    usual_method,
    without_idle,
)
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
    idle_of_methods,
    make_plan,
    make_sizes,
    method_settings,
)
from paceline.scaling.study_directory import OF_TRAINED, StudyDirectory
from paceline.training.config import TrainConfig, merge
from paceline.training.recipe import Recipe

USAGE = "paceline scale RECIPE|SCRIPT.py [options] [-- the script's own arguments]"
ABOUT = (
    "Measure how a training scales: short trainings on 1, 2, 4 ... workers, here or on hosts, in "
    "turns. Says images/s and efficiency against the best run of one worker, and where the time of "
    "a step and of an epoch goes; writes study.json, study.csv and report.html. Ctrl-C keeps what "
    "is measured; the same command with --study-dir resumes it."
)
_NOT_OURS = NOT_OF_TRIALS | {"workers", "sync"}
"""Options of training that the study settles, or that are for runs that one keeps."""
_BATCHES = {"weak": "batch_per_worker", "strong": "global_batch"}
_OTHER_MODE = {"weak": "strong", "strong": "weak"}


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
    """Read the command line.

    Raises:
        UsageError: Something in it can't be.
    """
    target = Target.read(tokens, USAGE, "what to measure")
    listed = listed_options(target.recipe, is_script=target.is_script)
    command = command_line("scale", target.name)
    if wants_help(target.own):
        show_help(command, ABOUT, listed, target.own)
    target.check()
    if any(word == "--sync" or word.startswith("--sync=") for word in target.own):
        raise UsageError("say --methods, such as allreduce,powersgd: several can be measured")
    options, parsed = parse_with_own(
        ScaleOptions, command, ABOUT, target.own, listed, _NOT_OURS, target.hint(command)
    )
    return _build_request(tuple(tokens), target, options, parsed)


def listed_options(recipe: Recipe | None, *, is_script: bool) -> list[OptionField]:
    """List the options of the study, of hosts, and of training.

    Args:
        recipe: Whose arguments and defaults are shown, if it is known.
        is_script: Whether the training is a script, which has fewer.
    """
    study = option_fields(ScaleOptions, "Study")
    training = list_training_options(recipe, is_script=is_script, without=_NOT_OURS)
    return [*study, CONFIG, *HOSTS, *training]


def _build_request(
    tokens: tuple[str, ...],
    target: Target,
    options: ScaleOptions,
    parsed: GivenOptions,
) -> ScaleRequest:
    """Settle what follows from the command line.

    Raises:
        UsageError: Something in it can't be.
    """
    # A file's batch is like a recipe's: that of one worker.
    given, other = dict(parsed.values), _BATCHES[_OTHER_MODE[options.mode]]
    settings = dict(target.settings)
    if other in given and other in parsed.of_file():
        settings = {n: v for n, v in settings.items() if n not in _BATCHES.values()}
        settings[other] = given.pop(other)
    # Where: the hosts.
    hosts = StudyHosts.split_from(given)
    # What: methods, numbers of workers and their sizes.
    methods = parse_methods(options.methods) or (usual_method(given, settings),)
    idle = dict(idle_of_methods(methods, given))
    if not options.train:
        idle |= idle_without_training(given, is_script=target.is_script)
    given = without_idle(replace(parsed, values=given), idle)
    workers = parse_workers(options.workers) or usual_workers(_most_workers(hosts, given))
    if not hosts.listed:
        check_machine(max(workers))
    sizes = make_sizes(workers, methods, hosts.listed)
    _check(options, given, target.script_args)
    # How each is run, and where the results go.
    place = StudyDirectory.of(options.study_dir, f"scale-{target.file_name}")
    of_methods = {n: v for n, v in given.items() if n in METHOD_OPTIONS}
    commands = StudyCommands(
        target=target.name,
        is_script=target.is_script,
        given={n: v for n, v in given.items() if n not in METHOD_OPTIONS},
        methods=of_methods,
        names_method=not target.is_script or options.methods is not None or bool(of_methods),
        hosts=hosts,
        hostfiles=place.path / "hosts",
        seconds=options.seconds,
        script_args=target.script_args,
    )
    request = ScaleRequest(
        tokens=tokens,
        options=options,
        commands=commands,
        sizes=sizes,
        methods=methods,
        batch=_batch(options, given, settings, is_script=target.is_script),
        place=place,
        settled=_settled(options, commands, given),
    )
    if target.recipe is not None:
        _check_recipe(request, target.recipe)
    return request


def _most_workers(hosts: StudyHosts, given: Mapping[str, OptionValue]) -> int:
    """Count the workers that there is room for."""
    return hosts.slots or _gpus(given) or usable_cores()


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
    options: ScaleOptions, given: Mapping[str, OptionValue], script_args: Sequence[str]
) -> None:
    """Refuse what would be ignored, or would fail after minutes only.

    Raises:
        UsageError: There is such a thing.
    """
    name, mode = _BATCHES[options.mode], _OTHER_MODE[options.mode]
    if _BATCHES[mode] in given:
        raise UsageError(
            f"{flag(_BATCHES[mode])} is for --mode {mode}; --mode {options.mode} takes {flag(name)}"
        )
    if fills(script_args) and name not in given:
        raise UsageError(f"{{global_batch}} in the script's arguments needs {flag(name)}")


def _check_recipe(request: ScaleRequest, recipe: Recipe) -> None:
    """Check each size's settings before anything is trained.

    Raises:
        UsageError: One can't be.
    """
    commands, gpus = request.commands, _gpus(request.commands.given)
    most = max(size.workers for size in request.sizes)
    if gpus and not commands.hosts.listed and most > gpus:
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
    given: Mapping[str, OptionValue],
) -> Mapping[str, object]:
    ends = {flag(n): v for n, v in given.items() if n in ONLY_TRAINED}
    content = {
        "recipe or script": commands.target,
        "--mode": options.mode,
        "--seconds": options.seconds,
        "hosts": [f"{host.name}:{host.slots}" for host in commands.hosts.listed],
        "the script's arguments": list(commands.script_args),
        **{flag(n): v for n, v in given.items() if n not in ONLY_TRAINED},
        OF_TRAINED: ends if options.train else None,
    }
    return as_read_back(content)  # it is compared with the study's file
