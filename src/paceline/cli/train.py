"""`paceline train RECIPE`: trains a recipe, the embedded digits by default."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from paceline.cli.cluster_submit import (
    ClusterChoice,
    cluster_options,
    run_dir_there,
    submit,
    take_cluster_choice,
)
from paceline.errors import UsageError
from paceline.launch.registry import launchers
from paceline.options.command_line import parse_options, with_defaults, words
from paceline.options.fields import OptionField, OptionValue
from paceline.recipes.registry import DEFAULT, reference_of
from paceline.results.run_directory import RunDirectory
from paceline.runtime.placement import choose_place
from paceline.runtime.spec import Launch
from paceline.runtime.start import start, warn_of_no_effect
from paceline.training.config import TrainConfig, TrainRequest, merge, training_options
from paceline.training.recipe import Recipe, absolute_reference, load_recipe
from paceline.training.sync.validation import refuse_idle

RUN_DIR = OptionField(
    name="run_dir",
    annotation=str | None,
    default=None,
    help="Directory that the training leaves behind; must be new or empty. "
    "Default: runs/NAME-TIME, where NAME is --name or the recipe's.",
    group="Output",
)

_ENVIRONMENT = "An option can also be given in the environment: PACELINE_EPOCHS for --epochs."


def main(tokens: Sequence[str]) -> int:
    """Run the command."""
    name, rest = (DEFAULT, tokens) if not tokens or tokens[0].startswith("-") else split(tokens)
    reference = reference_of(name)
    recipe = load_recipe(reference)
    given = parse_recipe_options(
        f"paceline train {name}", recipe, rest, [RUN_DIR, *cluster_options()]
    )
    # Separate what is the command's, the recipe's and the training's own.
    choice, where = take_cluster_choice(given), given.pop("run_dir", None)
    own = {argument.name for argument in recipe.arguments()}
    arguments = recipe.resolved({n: v for n, v in given.items() if n in own})
    options = {n: v for n, v in given.items() if n not in own}
    settings = merge(options, recipe.settings)
    config = TrainConfig.from_settings(settings)
    refuse_idle(config, options)
    request = TrainRequest(
        recipe=name,
        reference=absolute_reference(reference),
        arguments=arguments,
        settings=settings,
        given=tuple(given),
        run_dir="",
        command=("paceline", "train", *tokens),
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    paths = tuple(sorted(recipe.paths_among(arguments)))
    return begin(name, request, config, choice, given, where, paths)


def begin(
    target: str,
    request: TrainRequest,
    config: TrainConfig,
    choice: ClusterChoice,
    given: Mapping[str, OptionValue],
    where: OptionValue,
    paths: tuple[str, ...] = (),
) -> int:
    """Begin a new training here, on hosts, or on a cluster. Returns the exit code.

    Args:
        target: The recipe or script, as the user named it.
        request: The training; its run directory is settled here.
        config: Its options.
        choice: Where it is to go.
        given: Options and arguments that a cluster's nodes are given as well.
        where: The run directory; None for one with the training's name.
        paths: Names of the recipe's arguments that are paths.
    """
    is_script = request.kind == "script"
    name = file_name(Path(target).stem if is_script else target)
    of_run = config.metrics.name or name
    if config.launch.on in launchers():
        run_dir = str(where or run_dir_there(of_run))
        sent = words({n: v for n, v in given.items() if n != "on"} | {"run_dir": run_dir})
        command = ("paceline", "run" if is_script else "train", target, *sent)
        after = ("--", *request.script_args) if is_script else ()
        return submit(choice, config, (*command, *after), name, run_dir)
    choice.check(config.launch.on)
    place = choose_place(config, hosts=choice.hosts)
    if place.rank == 0:
        warn_of_no_effect(place, tuple(given))
    run = RunDirectory.usual(of_run, place.started_at())
    if where is not None:
        run = RunDirectory.named(str(where))
    return start(
        Launch(
            request=replace(request, run_dir=str(run.path)),
            config=config,
            run=run,
            place=place,
            is_new=True,
            is_named=where is not None,
            paths=paths,
        )
    )


def split(tokens: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Take the first word off."""
    return tokens[0], tokens[1:]


def parse_recipe_options(
    command: str, recipe: Recipe, tokens: Sequence[str], extra: Sequence[OptionField]
) -> dict[str, OptionValue]:
    """Read the options of training, the recipe's own arguments and those of the command.

    Raises:
        UsageError: Something unknown, or a recipe's argument has an option's name.
        HelpShown: Help was printed.
    """
    options = with_defaults(training_options(), recipe.settings)
    arguments = recipe.arguments()
    taken = {option.name for option in (*options, *extra)}
    for argument in arguments:
        if argument.name in taken:
            raise UsageError(
                f"recipe {recipe.name!r}: its argument {argument.name!r} is an option of every "
                "training already; set its default with @paceline.recipe(...)"
            )
    about = f"{recipe.summary} {_ENVIRONMENT}"
    return parse_options(command, about, tokens, [*arguments, *options, *extra])


def file_name(name: str) -> str:
    """Turn a recipe's name into part of a directory's name."""
    stem = name.rpartition("/")[2].replace(".py:", "-")
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in stem)
