"""`paceline resume [RUN_DIR]`: resumes exactly where a training stopped, also in mid-epoch."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from paceline.checkpoint.remote.url import OFF, check_url, is_url, reason_of, without_secrets
from paceline.cli.cluster_submit import ClusterChoice, cluster_options, render, take_cluster_choice
from paceline.cli.commands.train import read_recipe_options
from paceline.cli.dry_run import show_plan
from paceline.cli.output import FULL_OUTPUT, TRAIN_OUTPUT, Output
from paceline.cli.target import config_named, file_name, refuse_another
from paceline.distributed.environment import detect_launchers, read_environment
from paceline.distributed.options import DistOptions
from paceline.errors import ExitCode, PacelineError, StoreError, UsageError
from paceline.gradient_sync.options import without_other_methods
from paceline.launch.options import LaunchOptions
from paceline.launch.registry import launchers
from paceline.options.command_line import (
    GivenOptions,
    flag,
    names_something,
    note,
    part_script_args,
    read_options,
    show_help,
    take_option,
    wants_help,
    with_defaults,
    words,
)
from paceline.options.config_file import CONFIG
from paceline.options.fields import OptionField, OptionValue
from paceline.options.shell import command_line
from paceline.options.text import fitting, printable
from paceline.results.find_runs import choose_run
from paceline.results.run_directory import USUAL_FOLDER, RunDirectory
from paceline.runtime.placement import (
    choose_place,
    say_starting,
    warn_of_no_effect,
    worker_here,
)
from paceline.runtime.spec import Launch
from paceline.training.config import (
    TrainConfig,
    TrainRequest,
    training_options,
)
from paceline.training.recipe import load_recipe
from paceline.training.run_record.previous_run import PreviousRun
from paceline.training.sync.validation import refuse_idle

_ALLOW = OptionField(
    name="allow_change",
    annotation=tuple[str, ...],
    default=(),
    help="An option that may differ from the run's although it changes what is trained, for "
    "example: --epochs 20 --allow-change epochs. Repeat it for each. script-args allows other "
    "arguments of a script, after --.",
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
    "Resume exactly where a training stopped, in the middle of an epoch as well: without RUN_DIR, "
    "the newest below runs/ that isn't finished. Options are the run's own; those that change what "
    "is trained need --allow-change. RUN_DIR may be the URL of copies that --copy-to made: the run "
    "is fetched first."
)
_USAGE = "paceline resume [RUN_DIR] [OPTIONS]"
_SCRIPT_ARGS = "script_args"
_OTHER_ARGS = "--allow-change script-args -- ..."


def main(tokens: Sequence[str]) -> int:
    """Run the command."""
    if wants_help(tokens):
        _show_help(tokens)
    if not names_something(tokens):
        tokens = (_newest_unfinished(tokens), *tokens)
    where, rest, copies = tokens[0], tokens[1:], None
    if is_url(where):
        where, rest, copies = _fetched(where, rest)
    run = choose_run(where)
    past = PreviousRun.read(run)
    own, _ = part_script_args(rest)
    # A recipe's file may have been named from another directory.
    trained = past.reference if ":" in past.recipe else past.recipe
    recipe_trained = None if past.kind == "script" else trained
    refuse_another(f"{run.path} is a training of {past.recipe}", recipe_trained, config_named(own))
    if past.kind == "script":
        return _resume_script(run, past, where, rest, copies)
    recipe = load_recipe(past.reference)
    # What may be said anew, compared with what the training began with.
    command = shlex.join(("paceline", "resume", where))
    own_options = [_ALLOW, CONFIG, *TRAIN_OUTPUT, *cluster_options()]
    parsed = read_recipe_options(command, recipe, rest, own_options)
    given = parsed.values
    output, choice, allowed = _take_own(given, copies)
    given = recipe.with_absolute_paths(given)
    settings, arguments = past.changed(given, allowed, recipe.path_arguments())
    with parsed.placed():
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
    )
    paths = tuple(sorted(recipe.paths_among(arguments)))
    plans = choice.plans_alone(config.launch.on)
    output.print_settings(
        request, dict.fromkeys(settings, "run") | dict(parsed.sources), dry_run=plans
    )
    parsed = replace(parsed, values=given)
    return _resume(request, config, past, choice, parsed, allowed, paths, output)


def _show_help(tokens: Sequence[str]) -> NoReturn:
    """Show the options, with a run's values as their defaults where one is named."""
    named = [token for token in tokens if not wants_help((token,))][:1]
    # Without a run: all options, without defaults.
    if not names_something(named) or is_url(named[0]):
        own = [_ALLOW, _RUN_DIR, CONFIG, *TRAIN_OUTPUT, *cluster_options()]
        options = [replace(option, default=None) for option in training_options().values()]
        about = f"{_ABOUT} `paceline resume RUN_DIR --help` shows the run's own values."
        show_help(_USAGE, about, [*options, *own], tokens)
    # With a run: the options of its kind (recipe or script), its values as defaults.
    past = PreviousRun.read(choose_run(named[0]))
    if past.kind == "script":
        from paceline.runtime.script_options import script_options

        known, arguments = script_options(), {}
    else:
        known = training_options()
        arguments = {option.name: option for option in load_recipe(past.reference).arguments()}
    own = with_defaults(known, {**past.settings, "workers": past.world_size})
    own += [_ALLOW, CONFIG, *TRAIN_OUTPUT, *cluster_options()]
    options = [*with_defaults(arguments, past.arguments), *own]
    about = f"{_ABOUT} The defaults shown are those of the run."
    show_help(shlex.join(("paceline", "resume", named[0])), about, options, tokens)


def _newest_unfinished(tokens: Sequence[str]) -> str:
    """Find the run to resume where none was named, and say which. Returns its path.

    Raises:
        UsageError: There is none, it is running, or other workers might find another one.
    """
    from paceline.report.runs.listing import list_runs, newest_unfinished

    if _is_one_of_several(tokens):
        raise UsageError(
            "name the run directory: of several workers or nodes that are started one by one each "
            "might find another one. Usage: paceline resume RUN_DIR [options]"
        )
    newest = newest_unfinished(list_runs(USUAL_FOLDER.absolute()).entries)
    if newest is None:
        raise UsageError(
            f"no run below {USUAL_FOLDER.absolute()} is unfinished. Name a run directory: "
            "paceline resume RUN_DIR; `paceline runs` lists them"
        )
    where = str(USUAL_FOLDER / newest.label)
    if newest.state == "running":
        raise UsageError(
            f"{where}, the newest that isn't finished, is still running. To resume another "
            "one, name it: paceline resume RUN_DIR"
        )
    note(f"Resuming {where}")
    return where


def _fetched(url: str, tokens: Sequence[str]) -> tuple[str, Sequence[str], str]:
    """Fetch a run from its copies.

    Returns:
        The run directory, the command line without `--run-dir`, and the place below which the
        copies are, as `--copy-to` would have it.
    """
    where, rest = take_option(tokens, "--run-dir")
    placement = worker_here(LaunchOptions(), DistOptions())
    if placement is not None and placement.world_size > 1:
        raise UsageError(
            "several workers were started, each of which would fetch the run: first copy "
            f"{without_secrets(url)} into a directory by the store's own tool, such as `aws s3 "
            "sync`, and resume that"
        )
    url, run = _fetch(url, where)
    return str(run.path), rest, url.rpartition("/")[0]


def _fetch(url: str, where: str | None) -> tuple[str, RunDirectory]:
    """Fetch a run from its copies into a new run directory; nothing is left where that fails.

    A run directory that has been copied there itself is taken as it is.

    Args:
        url: Where its copies are.
        where: The run directory; None for runs/RUN.

    Returns:
        The URL without a slash at its end, and the run directory.

    Raises:
        UsageError: There is no run, or the directory isn't new.
        InfrastructureError: The store failed, or no snapshot is whole.
    """
    url = check_url(url, "the run's URL")
    usual = USUAL_FOLDER / file_name(url.rpartition("/")[2])
    run = RunDirectory.named(where if where is not None else usual)
    from paceline.checkpoint.remote.record import CopyRecord

    here = CopyRecord.read(run) if run.run_json.exists() else None
    if here is not None and here.url == url:
        note(f"{run.path} is the run that is copied to {url}: nothing is fetched")
        return url, run
    from paceline.checkpoint.remote.fetch import fetch_run  # imports torch
    from paceline.checkpoint.remote.store import open_store

    store = open_store(url)
    try:
        fetch_run(url, store, run, note)
    except PacelineError:
        raise
    except Exception as error:  # noqa: BLE001  # a store's library may raise anything, with secrets
        raise StoreError(f"{url} can't be fetched: {reason_of(error)}") from None
    return url, run


def _take_own(
    given: dict[str, OptionValue], copies: str | None
) -> tuple[Output, ClusterChoice, list[str]]:
    """Take off what is the command's own; the training's options are left. See `_copy_on`."""
    given.pop("config", None)
    output = Output.take(given)
    output.quieten(given)
    choice = take_cluster_choice(given)
    allowed = _names(given.pop("allow_change", ()))
    _copy_on(given, copies, choice)
    return output, choice, allowed


def _copy_on(given: dict[str, OptionValue], copies: str | None, choice: ClusterChoice) -> None:
    """Go on copying a run to where it was fetched from, unless another place is given.

    Args:
        given: The options; `copy_to` is added.
        copies: The place below which its copies are; None of a run that wasn't fetched.
        choice: Hosts copy nothing: each of them has the snapshots.
    """
    if copies is None or "copy_to" in given:
        return
    given["copy_to"] = copies
    if choice.hosts.named:
        note(f"Nothing more is copied to {copies}: with --hosts every host has the snapshots")
        given["copy_to"] = OFF


def _resume_script(
    run: RunDirectory, past: PreviousRun, where: str, words: Sequence[str], copies: str | None
) -> int:
    from paceline.runtime.script_options import (
        refuse_of_recipes,
        script_options,
        warn_of_variables,
    )

    if not Path(past.reference).is_file():
        raise UsageError(f"the script {past.reference} of this training is gone")
    # Options of Paceline, and which of them may differ from the run's.
    tokens, script_args = part_script_args(words)
    own_options = [_ALLOW, CONFIG, *TRAIN_OUTPUT, *cluster_options()]
    options = [*script_options().values(), *own_options]
    refuse_of_recipes(tokens, "The script's own arguments are those that the training began with")
    parsed = read_options(shlex.join(("paceline", "resume", where)), _ABOUT, tokens, options)
    given = parsed.values
    warn_of_variables([*training_options().values(), *options], is_script=True)
    output, choice, allowed = _take_own(given, copies)
    other_args = "--" in words and script_args != past.script_args
    if other_args and _SCRIPT_ARGS not in allowed:
        began = " ".join(past.script_args) or "none"
        raise UsageError(
            f"the script's own arguments are those that the training began with ({began}): others "
            f"need --allow-change {_SCRIPT_ARGS.replace('_', '-')}"
        )
    if _SCRIPT_ARGS in allowed:  # they may well be about the length of the training
        allowed = [name for name in allowed if name != _SCRIPT_ARGS] + ["epochs"]
    past.changed(given, allowed)  # refuses
    _refuse_of_script(past, given)
    # What the script itself says it will say again.
    given_then = {"global_batch" if name == "batch_per_worker" else name for name in past.given}
    before = {n: v for n, v in past.settings.items() if n in given_then}
    before = without_other_methods(before, given)
    settings = before | given
    request = TrainRequest(
        kind="script",
        recipe=past.recipe,
        reference=past.reference,
        script_args=script_args if other_args else past.script_args,
        settings=settings,
        given=tuple(dict.fromkeys((*before, *given))),
        allowed=tuple(allowed),
        run_dir=str(run.path),
        command=("paceline", "resume", where, *words),
    )
    with parsed.placed():
        config = TrainConfig.from_settings(settings)
    sources = dict.fromkeys(settings, "run") | dict(parsed.sources)
    output.print_settings(request, sources, dry_run=choice.plans_alone(config.launch.on))
    return _resume(request, config, past, choice, parsed, allowed, (), output)


def _refuse_of_script(past: PreviousRun, given: Mapping[str, OptionValue]) -> None:
    """Refuse options that contradict what the script itself sets, before anything is started.

    Raises:
        UsageError: There is such an option.
    """
    for name, value in given.items():
        option, before = training_options().get(name), past.settings.get(name)
        is_scripts_own = option is not None and name not in past.given and before != option.default
        if is_scripts_own and before is not None and before != value:
            raise UsageError(
                f"the script itself says {name}={before}, so that {flag(name)} "
                f"{value} would contradict it: change it there, or its arguments ({_OTHER_ARGS})"
            )


def _resume(
    request: TrainRequest,
    config: TrainConfig,
    past: PreviousRun,
    choice: ClusterChoice,
    parsed: GivenOptions,
    allowed: Sequence[str],
    paths: tuple[str, ...] = (),
    output: Output = FULL_OUTPUT,
) -> int:
    """Resume a training here, on hosts, or on a cluster that sees its run directory."""
    run = RunDirectory.named(request.run_dir)
    # PACELINE_NAME and the like are for new trainings as well: only what was typed counts.
    given, typed = parsed.values, parsed.typed()
    if not _is_one_of_several(request.command) and _is_finished(run, past, request):
        ignored = [flag(name) for name in given if name in typed]
        return _print_finished(run, past, request, ignored, output)
    if config.launch.on in launchers():
        output.refuse_json(config.launch.on)
        sent = {n: v for n, v in given.items() if n != "on"}
        sent |= {"allow_change": tuple(allowed)} if allowed else {}
        options = (*words(sent), *output.sent_on())
        name = file_name(run.path.name)
        return render(choice, config, ("resume",), options, name, str(run.path))
    # Here or on hosts; options for clusters have no meaning then.
    choice.check(config.launch.on)
    with output.apart():
        place = choose_place(config, usual_workers=past.world_size, hosts=choice.hosts)
        launch = Launch(
            request=request,
            config=config,
            run=run,
            place=place,
            is_new=False,
            paths=paths,
            quiet=output.quiet,
        )
        if choice.plans_alone(config.launch.on):
            return show_plan(launch) if place.rank == 0 else ExitCode.DONE
        if place.rank == 0:
            warn_of_no_effect(place, given)
            alone = place.hosts is None and not place.started_apart
            _warn_of_missing_snapshot(run, run.newest_step(), alone=alone)
        say_starting(place, config.metrics.progress)
        from paceline.runtime.start import start  # after that has been said

        code = start(launch)
    if place.rank == 0:
        output.print_end(run, code)
    return code


def _is_one_of_several(tokens: Sequence[str]) -> bool:
    """Tell whether other workers or nodes run this command as well, started one by one."""
    launchers = detect_launchers(read_environment())
    apart = any(placement.world_size > 1 for placement in launchers.workers)
    apart = apart or (launchers.node is not None and launchers.node.nodes > 1)
    return apart or any(token.partition("=")[0] == "--rank" for token in tokens)


_ENDED_BY: Mapping[str, tuple[str, ...]] = {
    "epochs": ("epochs",),
    "target": ("target_accuracy", "patience"),
    "patience": ("early_stopping",),
    "time": ("time_budget",),
}
"""What settles that a training ends for a reason: with others there may be more to train."""


def _is_finished(run: RunDirectory, past: PreviousRun, request: TrainRequest) -> bool:
    """Tell whether a training has finished, and no option asks for more.

    Where its last snapshot is gone there is something to train again. A script may have got a
    longer loop: it is started where it has changed since, or the user allows changes.
    """
    try:
        summary = run.read_summary()
        ended, steps = summary.get("stopped_because"), summary.get("steps")
        if ended in (None, "signal") or run.newest_step() != steps or run.is_locked():
            return False
        if past.kind == "script":
            ended_at_s = run.summary_json.stat().st_mtime
            if request.allowed or Path(past.reference).stat().st_mtime > ended_at_s:
                return False
    except (OSError, ValueError):
        return False
    # It goes on where the setting that ended it has changed.
    names = _ENDED_BY.get(str(ended), ())
    return all(
        request.settings[name] == past.settings.get(name)
        for name in names
        if name in request.settings
    )


def _print_finished(
    run: RunDirectory,
    past: PreviousRun,
    request: TrainRequest,
    ignored: Sequence[str],
    output: Output,
) -> int:
    """Say that nothing is left to train, and how to train on. Returns the exit code.

    Args:
        run: The run directory; nothing in it is changed.
        ignored: The options that were typed and have no effect.
    """
    from paceline.report.load_run import read_run
    from paceline.report.run_outcome import describe_ending

    report = read_run(run, with_steps=False)
    name = _ENDED_BY.get(str(report.summary.get("stopped_because")), ("",))[0]
    again = ["resume", str(run.path)]
    # With its epochs trained, too, a training needs more of them besides.
    all_trained = report.summary.get("epochs") == request.settings.get("epochs")
    for each in dict.fromkeys((name, "epochs") if name and all_trained else (name,)):
        again += [flag(each), "..."] if each else []
        if each != "epochs" or not past.is_complete:  # more epochs are then allowed as they are
            again += ["--allow-change", flag(each or "epochs").lstrip("-")]
    more = f"To train on: {command_line(*again)}"
    if request.kind == "script" and name not in request.given:
        command = command_line("resume", run.path)
        more = (
            f"To train on: change the script's loop, then {command} --allow-change epochs; or give "
            f"the script other arguments: {command} {_OTHER_ARGS}"
        )
    with output.apart():
        if not output.quiet:
            sentence = describe_ending(report).sentence.removeprefix("finished ")
            message = printable(
                f"{run.path} has finished: {sentence}. Nothing was changed.\n{more}"
            )
            print(fitting(message, sys.stdout))
    if ignored:
        note(f"No effect on a finished run: {', '.join(ignored)}")
    output.print_end(run, ExitCode.DONE)
    return ExitCode.DONE


def _names(allowed: object) -> list[str]:
    listed = allowed if isinstance(allowed, tuple | list) else ()
    return [str(name).replace("-", "_") for name in listed]


def _warn_of_missing_snapshot(run: RunDirectory, step: int, *, alone: bool) -> None:
    if step < 0:
        unless = "" if alone else ", unless another host has one"
        print(
            f"There is no snapshot in {run.snapshots}: the training starts from the beginning"
            f"{unless}",
            flush=True,
        )
