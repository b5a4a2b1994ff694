"""`paceline train RECIPE`: trains a recipe, the embedded digits by default."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from paceline.cli.cluster_submit import (
    ClusterChoice,
    cluster_options,
    render,
    run_dir_there,
    take_cluster_choice,
)
from paceline.cli.dry_run import show_plan
from paceline.cli.output import FULL_OUTPUT, TRAIN_OUTPUT, Output
from paceline.cli.target import file_name, merge_layers, take_target
from paceline.errors import ExitCode, UsageError
from paceline.launch.registry import launchers
from paceline.options.command_line import (
    GivenOptions,
    names_something,
    read_options,
    wants_help,
    with_defaults,
    words,
)
from paceline.options.config_file import CONFIG, PRINT_CONFIG, as_toml
from paceline.options.fields import OptionField, OptionValue
from paceline.recipes.registry import DEFAULT, reference_of
from paceline.results.run_directory import RunDirectory
from paceline.runtime.placement import choose_place, say_starting, warn_of_no_effect
from paceline.runtime.script_options import warn_of_variables
from paceline.runtime.spec import Launch
from paceline.training.config import Kind, TrainConfig, TrainRequest, training_options
from paceline.training.recipe import Recipe, absolute_reference, load_recipe
from paceline.training.run_record.previous_run import PreviousRun
from paceline.training.sync.validation import refuse_idle

RUN_DIR = OptionField(
    name="run_dir",
    annotation=str | None,
    default=None,
    help="Directory that the training leaves behind; must be new or empty. "
    "Default: runs/NAME-TIME, where NAME is --name or the recipe's.",
    group="Output",
)

_WHICH = (
    "RECIPE is one that `paceline recipes` lists, or FILE.py:FUNCTION of your own. Without one:"
)
_ENVIRONMENT = "An option can also be given in the environment: PACELINE_EPOCHS for --epochs."


def main(tokens: Sequence[str]) -> int:
    """Run the command."""
    is_named = names_something(tokens)
    name, rest = take_target(tokens, "paceline train RECIPE", "the recipe", DEFAULT)
    reference = reference_of(name)
    recipe = load_recipe(reference)
    command, which = f"paceline train {name}", ""
    if not is_named and wants_help(rest):
        command, which = "paceline train RECIPE", _WHICH
    own_options = [RUN_DIR, CONFIG, PRINT_CONFIG, *TRAIN_OUTPUT, *cluster_options()]
    parsed = read_recipe_options(command, recipe, rest, own_options, which)
    if begun := holding_training(parsed):
        return resume_begun(begun, parsed, "recipe", name)
    given, sources = parsed.values, parsed.sources
    given.pop("config", None)
    output, prints = Output.take(given), given.pop("print_config", False)
    # Separate what is the command's, the recipe's and the training's own.
    choice, where = take_cluster_choice(given), given.pop("run_dir", None)
    own = {argument.name for argument in recipe.arguments()}
    arguments = recipe.resolved({n: v for n, v in given.items() if n in own})
    options = {n: v for n, v in given.items() if n not in own}
    output.quieten(options)
    settings = merge_layers(options, parsed.of_file(), recipe.settings)
    with parsed.placed():
        config = TrainConfig.from_settings(settings)
    refuse_idle(config, [name for name in options if name in settings])
    given = {n: v for n, v in given.items() if n in settings or n not in options}
    request = TrainRequest(
        recipe=name,
        reference=absolute_reference(reference),
        arguments=arguments,
        settings=settings,
        given=tuple(given),
        command=("paceline", "train", *tokens),
    )
    if prints:
        print_config(request)
        return ExitCode.DONE
    plans = choice.plans_alone(config.launch.on)
    output.print_settings(request, sources, dry_run=plans)
    paths = tuple(sorted(recipe.paths_among(arguments)))
    return begin(name, request, config, choice, given, where, paths, output)


def begin(
    target: str,
    request: TrainRequest,
    config: TrainConfig,
    choice: ClusterChoice,
    given: Mapping[str, OptionValue],
    where: OptionValue,
    paths: tuple[str, ...] = (),
    output: Output = FULL_OUTPUT,
) -> int:
    """Begin a new training here, on hosts, or on a cluster. Returns the exit code.

    Args:
        target: The recipe or script, as the user named it.
        request: The training; its run directory is settled here.
        given: Options and arguments that a cluster's nodes are given as well.
        where: The run directory; None for one with the training's name.
        paths: Names of the recipe's arguments that are paths.
    """
    is_script = request.kind == "script"
    name = file_name(Path(target).stem if is_script else target)
    of_run = config.metrics.name or name
    if config.launch.on in launchers():
        output.refuse_json(config.launch.on)
        run_dir = str(where or run_dir_there(of_run))
        sent = words({n: v for n, v in given.items() if n != "on"}) + output.sent_on()
        return render(
            choice,
            config,
            ("run" if is_script else "train", target),
            tuple(sent),
            name,
            run_dir,
            request.script_args,
        )
    choice.check(config.launch.on)
    with output.apart():
        place = choose_place(config, hosts=choice.hosts)
        if place.rank == 0:
            warn_of_no_effect(place, tuple(given))
        run = RunDirectory.usual(of_run, place.started_at())
        if where is not None:
            run = RunDirectory.named(str(where))
        runs = [run]
        launch = Launch(
            request=replace(request, run_dir=str(run.path)),
            config=config,
            run=run,
            place=place,
            is_new=True,
            is_named=where is not None,
            paths=paths,
            quiet=output.quiet,
            settled=runs.append,
        )
        if choice.plans_alone(config.launch.on):
            return show_plan(launch) if place.rank == 0 else ExitCode.DONE
        say_starting(place, config.metrics.progress)
        # Imported after that has been said: it brings all that starts and watches processes.
        from paceline.runtime.start import start

        code = start(launch)
    if place.rank == 0:
        output.print_end(runs[-1], code)
    return code


def holding_training(parsed: GivenOptions) -> str | None:
    """Return the run directory with which `--resume` goes on; None where a training is to begin.

    Raises:
        UsageError: `--resume` was given without a run directory.
    """
    given = parsed.values
    if not given.get("resume") or given.get("on") in launchers():
        return None
    if not given.get("run_dir"):
        raise UsageError("--resume needs --run-dir: a directory of a name that stays the same")
    where = str(given["run_dir"])
    return where if RunDirectory.named(where).run_json.exists() else None


def resume_begun(
    run_dir: str, parsed: GivenOptions, kind: Kind, recipe: str, script_args: Sequence[str] = ()
) -> int:
    """Resume a training by the options that it was begun with. Returns the exit code.

    Raises:
        UsageError: The training is of another recipe or script.
    """
    from paceline.cli.commands import resume  # which imports this module

    past = PreviousRun.read(RunDirectory.named(run_dir))
    # By its last part: the path to a file may be written in several ways.
    if (past.kind, Path(past.recipe).name) != (kind, Path(recipe).name):
        raise UsageError(
            f"{run_dir} holds a training of the {past.kind} {past.recipe}, not of the {kind} "
            f"{recipe}. Name another directory with --run-dir"
        )
    dropped = {"resume", "run_dir", "name", "tag", "note"}  # the run has its labels already
    typed = parsed.typed() - dropped
    own = words({n: v for n, v in parsed.values.items() if n in typed})
    return resume.main([run_dir, *own, *(["--", *script_args] if script_args else [])])


def print_config(request: TrainRequest) -> None:
    """Print a training's settings as a file that `--config` takes.

    Those that keep their defaults, and those that have no effect with the others, are comments.
    """
    config = TrainConfig.from_settings(request.settings)
    settings = config.settings()
    print(f"# Settings of {request.recipe}; what is commented out is the default.")
    if request.kind == "recipe":
        print(as_toml("recipe", request.recipe))
    for name, value in request.arguments.items():
        print(as_toml(name, value))
    for name, option in training_options().items():
        value = settings[name]
        is_set = name in request.settings and (value != option.default or name in request.given)
        mark = "" if is_set and _counts(config, name) else "# "
        print(f"{mark}{as_toml(name, value)}")


def _counts(config: TrainConfig, name: str) -> bool:
    try:
        refuse_idle(config, [name])
    except UsageError:
        return False
    return True


def read_recipe_options(
    command: str,
    recipe: Recipe,
    tokens: Sequence[str],
    extra: Sequence[OptionField],
    which: str = "",
) -> GivenOptions:
    """Read the options of training, the recipe's own arguments and those of the command.

    Args:
        which: What `--help` says before what it says of the recipe.

    Raises:
        UsageError: Something unknown, or a recipe's argument has an option's name.
        HelpShown: Help was printed.
    """
    options = with_defaults(training_options(), recipe.settings)
    arguments = recipe.arguments()
    reserved = {option.name for option in (*options, *extra)}
    # An argument by an option's name could be given for neither.
    for argument in arguments:
        if argument.name in reserved:
            raise UsageError(
                f"recipe {recipe.name!r}: its argument {argument.name!r} is an option of every "
                "training already; set its default with @paceline.recipe(...)"
            )
    about = f"{which} {recipe.summary} {_ENVIRONMENT}".strip()
    known = [*arguments, *options, *extra]
    parsed = read_options(command, about, tokens, known)
    warn_of_variables(known)
    return parsed
