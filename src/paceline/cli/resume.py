"""`paceline resume RUN_DIR`: goes on exactly where a training stopped, in mid-epoch as well."""

import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from paceline.checkpoint.remote.url import is_url, without_secrets
from paceline.cli.cluster_submit import ClusterChoice, cluster_options, submit, take_cluster_choice
from paceline.cli.train import file_name, parse_recipe_options
from paceline.distributed.options import DistOptions
from paceline.errors import UsageError
from paceline.gradient_sync.options import without_other_methods
from paceline.launch.options import LaunchOptions
from paceline.launch.registry import launchers
from paceline.options.command_line import (
    parse_options,
    show_help,
    take_option,
    take_word,
    wants_help,
    words,
)
from paceline.options.fields import OptionField, OptionValue
from paceline.options.shell import command_line
from paceline.results.run_directory import RunDirectory
from paceline.runtime.placement import choose_place, worker_here
from paceline.runtime.spec import Launch
from paceline.runtime.start import start, warn_of_no_effect
from paceline.training.config import TrainConfig, TrainRequest, training_options
from paceline.training.previous_run import PreviousRun
from paceline.training.recipe import load_recipe
from paceline.training.sync.validation import refuse_idle

_ALLOW = OptionField(
    name="allow_change",
    annotation=tuple[str, ...],
    default=(),
    help="An option that may differ from the run's although it changes what is trained, for "
    "example: --epochs 20 --allow-change epochs. Repeat it for each.",
    group="Resuming",
)

_RUN_DIR = OptionField(
    name="run_dir",
    annotation=str | None,
    default=None,
    help="With a URL: the directory that the run is fetched into; must be new or empty. "
    "Default: runs/RUN.",
    group="Resuming",
)

_ABOUT = (
    "Go on exactly where a training stopped, in the middle of an epoch as well. Options are the "
    "run's own; those that change what is trained need --allow-change. RUN_DIR may be the URL of "
    "copies that --copy-to made: the run is fetched first."
)


def main(tokens: Sequence[str]) -> int:
    """Run the command."""
    if wants_help(tokens):
        options = [*training_options().values(), _ALLOW, _RUN_DIR, *cluster_options()]
        show_help("paceline resume RUN_DIR", _ABOUT, options)
    where, rest = take_word(tokens, "paceline resume RUN_DIR", "the run directory")
    if is_url(where):
        where, rest = _fetched(where, rest)
    run = RunDirectory.named(where)
    past = PreviousRun.read(run)
    if past.kind == "script":
        return _resume_script(run, past, where, rest)
    recipe = load_recipe(past.reference)
    # What may be said anew, compared with what the training began with.
    given = parse_recipe_options(
        shlex.join(("paceline", "resume", where)), recipe, rest, [_ALLOW, *cluster_options()]
    )
    choice, allowed = take_cluster_choice(given), _names(given.pop("allow_change", ()))
    given = recipe.with_absolute_paths(given)
    settings, arguments = past.changed(given, allowed, recipe.path_arguments())
    config = TrainConfig.from_settings(settings)
    refuse_idle(config, given)
    if "epochs" in given:
        past.check_epochs(config.loop.epochs, run.newest_step())
    request = TrainRequest(
        recipe=past.recipe,
        reference=past.reference,
        arguments=arguments,
        settings=settings,
        given=tuple(dict.fromkeys((*past.given, *given))),
        run_dir=str(run.path),
        command=("paceline", "resume", *tokens),
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    paths = tuple(sorted(recipe.paths_among(arguments)))
    return _resume(request, config, past, choice, given, allowed, paths)


def _fetched(url: str, tokens: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Fetch a run from its copies.

    Args:
        url: As the user gave it.
        tokens: The command line after it.

    Returns:
        The run directory, and the command line without `--run-dir`; copies go on to the same place
        unless it says otherwise.
    """
    from paceline.cli.copy import fetch

    where, rest = take_option(tokens, "--run-dir")
    found = worker_here(LaunchOptions(), DistOptions())
    if found is not None and found.world_size > 1:
        raise UsageError(
            "several workers were started, each of which would fetch the run: fetch it first, by "
            f"{command_line('copy', without_secrets(url), 'RUN_DIR')}, and resume RUN_DIR"
        )
    url, run = fetch(url, where)
    if not any(token.partition("=")[0] == "--copy-to" for token in rest):
        rest = [*rest, "--copy-to", url.rpartition("/")[0]]
    return str(run.path), rest


def _resume_script(run: RunDirectory, past: PreviousRun, where: str, tokens: Sequence[str]) -> int:
    from paceline.runtime.script_options import script_options

    if not Path(past.reference).is_file():
        raise UsageError(f"the script {past.reference} of this training is gone")
    if "--" in tokens:
        raise UsageError(
            "the script's own arguments are those that the training began with; they can't be "
            "given anew: " + (" ".join(past.script_args) or "none")
        )
    options = [*script_options().values(), _ALLOW, *cluster_options()]
    given = parse_options(shlex.join(("paceline", "resume", where)), _ABOUT, tokens, options)
    choice, allowed = take_cluster_choice(given), _names(given.pop("allow_change", ()))
    past.changed(given, allowed)  # refuses
    # What the script itself says it will say again.
    given_then = {"global_batch" if name == "batch_per_worker" else name for name in past.given}
    before = {n: v for n, v in past.settings.items() if n in given_then}
    before = without_other_methods(before, given)
    settings = before | given
    request = TrainRequest(
        kind="script",
        recipe=past.recipe,
        reference=past.reference,
        arguments={},
        script_args=past.script_args,
        settings=settings,
        given=tuple(dict.fromkeys((*before, *given))),
        allowed=tuple(allowed),
        run_dir=str(run.path),
        command=("paceline", "resume", where, *tokens),
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    return _resume(request, TrainConfig.from_settings(settings), past, choice, given, allowed)


def _resume(
    request: TrainRequest,
    config: TrainConfig,
    past: PreviousRun,
    choice: ClusterChoice,
    given: Mapping[str, OptionValue],
    allowed: Sequence[str],
    paths: tuple[str, ...] = (),
) -> int:
    """Resume a training here, on hosts, or on a cluster that sees its run directory."""
    run = RunDirectory.named(request.run_dir)
    if config.launch.on in launchers():
        sent = {n: v for n, v in given.items() if n != "on"}
        sent |= {"allow_change": tuple(allowed)} if allowed else {}
        command = ("paceline", "resume", str(run.path), *words(sent))
        return submit(choice, config, command, file_name(run.path.name), str(run.path))
    # Here or on hosts; options for clusters have no meaning then.
    choice.check(config.launch.on)
    place = choose_place(config, usual_workers=past.world_size, hosts=choice.hosts)
    launch = Launch(request=request, config=config, run=run, place=place, is_new=False, paths=paths)
    if place.rank == 0:
        warn_of_no_effect(place, given)
        alone = place.hosts is None and not place.started_apart
        _say_what_is_gone(run, run.newest_step(), alone=alone)
    return start(launch)


def _names(allowed: object) -> list[str]:
    listed = allowed if isinstance(allowed, tuple | list) else ()
    return [str(name).replace("-", "_") for name in listed]


def _say_what_is_gone(run: RunDirectory, step: int, *, alone: bool) -> None:
    if step < 0:
        unless = "" if alone else ", unless another host has one"
        print(
            f"There is no snapshot in {run.snapshots}: the training starts from the beginning"
            f"{unless}",
            flush=True,
        )
