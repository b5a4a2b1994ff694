"""`paceline verify`: is a training the same on any number of workers? Trains on each, compares."""

import time
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline._version import __version__
from paceline.cli.output import check_place
from paceline.cli.target import (
    NOT_OF_TRIALS,
    Target,
    config_named,
    list_training_options,
    merge_layers,
    refuse_another,
)
from paceline.data.options import choose_global_batch
from paceline.errors import ExitCode, UsageError
from paceline.files import read_json_object, write_json, writing
from paceline.launch.scratch import scratch_directory
from paceline.launch.worker_count import (
    check_machine,
)
from paceline.options.command_line import (
    names_something,
    note,
    part_script_args,
    read_options,
    show_help,
    wants_help,
)
from paceline.options.config_file import CONFIG
from paceline.options.fields import OptionField, OptionValue, option_fields, pick
from paceline.options.figures import listed as in_words
from paceline.options.quantities import parse_sizes
from paceline.options.shell import command_line
from paceline.options.text import printable
from paceline.recipes.registry import reference_of
from paceline.results.run_directory import RunDirectory
from paceline.runtime.placement import count_gpus
from paceline.training.config import TrainConfig, TrainRequest
from paceline.training.recipe import Recipe, absolute_reference
from paceline.verify.annotations import github_annotations
from paceline.verify.launch_commands import (
    LaunchCommand,
    find_launcher,
    left_out,
    read_launch_command,
)
from paceline.verify.launches import VerifyLauncher, VerifyRequest
from paceline.verify.options import COUNTS, VerifyOptions

if TYPE_CHECKING:
    from paceline.verify.trace import Trace

_USAGE = (
    "paceline verify RECIPE|SCRIPT.py [--resume] [options] [-- the script's own arguments], or "
    "paceline verify [--resume] [options] -- LAUNCHING COMMAND"
)
_ABOUT = (
    "Train the same steps on several numbers of workers, one after the other, and compare samples, "
    "losses, gradients and weights step by step. A script may be written for paceline.session(), "
    "or be plain PyTorch as torchrun starts it, or by mp.spawn: it runs unchanged; {workers} in "
    "its arguments stands for their number. A command of torchrun, accelerate launch or python is "
    "taken as it is, after --: it is run on one worker, and on as many as it says. Where there are "
    "fewer GPUs than workers, all train on the CPU. Each launch runs in a copy of the project. "
    "With --resume one number of workers is trained on, killed and started again: is it the "
    "same training? "
    "Exit code 0: the same bits, the same to rounding, or but for chance; 65: something differs or "
    "is wrong."
)


_OPTIONS = option_fields(VerifyOptions, "Verify")
_OWN = {option.name for option in (*_OPTIONS, CONFIG)}
_NOT_OURS = NOT_OF_TRIALS | {"workers"}
"""Options of training that say where workers run: the verification does."""


def main(tokens: Sequence[str]) -> int:
    """Run the command."""
    own, _ = part_script_args(tokens)
    if wants_help(own) and own[0].startswith("-"):
        show_help(_USAGE, _ABOUT, _listed_options(), own)
    with scratch_directory() as place:
        return _verify(_read(tokens), place)


def _read(tokens: Sequence[str]) -> VerifyRequest:
    """Read the command line.

    Raises:
        UsageError: Something in it can't be.
    """
    own, after = part_script_args(tokens)
    _refuse_no_training(own)
    command, shown, hint = None, "paceline verify", ""
    # What to verify decides which options there are: without a name it is a launching command.
    if "--" in tokens and not names_something(own):
        command = read_launch_command(after)
        target = _target_of(command, own)
    else:
        target = Target.read(tokens, _USAGE, "what to verify")
        shown = command_line("verify", target.name)
        hint = target.hint(shown)
    listed = _listed_options(target.recipe)
    parsed = read_options(shown, _ABOUT, target.own, listed, hint, _NOT_OURS)
    if command is None or not command.is_module:
        target.check()
    # Settings of the training, without those of this command.
    given = {name: value for name, value in parsed.values.items() if name not in _OWN}
    options = pick(VerifyOptions, parsed.values)
    request = replace(
        _training(target, given, parsed.of_file(), command), command=("paceline", "verify", *tokens)
    )
    with parsed.placed():
        config = TrainConfig.from_settings(request.settings)
    # The numbers of workers, each of which must be able to share the batch.
    workers = _workers(parsed.values.get("workers"), command, single=options.resume)
    counts = (*workers, *([options.resume_workers] if options.resume_workers else []))
    check_machine(max(counts))
    for count in counts if target.recipe is not None else ():
        choose_global_batch(config.data, count)
    _check(options, config, max(counts), is_script=target.is_script)
    return VerifyRequest(
        training=request, config=config, workers=workers, options=options, command=command
    )


def _target_of(command: LaunchCommand, own: Sequence[str]) -> Target:
    """Return the script that a launching command is of, and note what is left out of that."""
    refuse_another(f"the command names {command.script}", None, config_named(own))
    if command.has_launcher and (others := left_out(command)):
        note(f"left out of the command, since all is run on this machine, once: {in_words(others)}")
    return Target(name=command.script, recipe=None, own=tuple(own), script_args=command.arguments)


def _refuse_no_training(words: Sequence[str]) -> None:
    """Refuse what is neither a recipe nor a script, but is often given.

    Raises:
        UsageError: It is a launcher, a module, or the directory of a run.
    """
    if "-m" in words:
        raise UsageError(
            "a module (-m) is verified by the command that starts it, after --: `paceline verify "
            "-- torchrun --nproc-per-node 2 -m PACKAGE.MODULE ...`"
        )
    if find_launcher(words):
        raise UsageError(
            f"{words[0]} is no recipe: a launching command comes after --, and options before "
            f"that: `paceline verify -- {words[0]} ...`"
        )
    if names_something(words) and RunDirectory.named(words[0]).run_json.exists():
        raise UsageError(f"{words[0]} is a run directory: give the recipe or the script it is of")


def _workers(given: OptionValue, command: LaunchCommand | None, *, single: bool) -> tuple[int, ...]:
    """Choose the numbers of workers: the user's, or one and what a launching command says.

    Args:
        given: What `--workers` says, if anything.
        single: Whether it is one number alone, on which a training resumes.

    Raises:
        UsageError: They are none, too few or too many.
    """
    says = command.workers if command is not None else 0
    default = f"{says}" if says else "1" if single else COUNTS
    if not given and command is not None and not (command.follows_workers or says):
        raise UsageError(
            "the command doesn't say in figures how many workers it starts: give --workers before "
            f"--, such as --workers {2 if single else COUNTS}"
        )
    text = str(given or default)
    # A command is run on one worker as well.
    numbers = parse_sizes(text if single or command is None else f"1,{text}", "workers")
    if single and len(numbers) > 1:
        raise UsageError(f"--workers is {text}: with --resume it is one number, such as 2")
    if not single and len(numbers) < 2:
        raise UsageError(f"{text} worker alone can't be compared: give --workers, such as {COUNTS}")
    return numbers


def _listed_options(recipe: Recipe | None = None) -> list[OptionField]:
    of_training = list_training_options(recipe, is_script=recipe is None, without=_NOT_OURS)
    return [*_OPTIONS, CONFIG, *of_training]


def _check(options: VerifyOptions, config: TrainConfig, most: int, *, is_script: bool) -> None:
    """Refuse what would fail after minutes of training only.

    Raises:
        UsageError: There is such a thing.
    """
    shards, json, html = config.data.shards, options.json_file, options.html_file
    if shards is not None and most > shards:
        name = "--resume-workers" if most == options.resume_workers else "--workers"
        raise UsageError(
            f"{name} says {most}, more than --shards {shards}: give at least {most} shards, "
            "or fewer workers"
        )
    if options.resume_words and not is_script:
        raise UsageError("--resume-args are for a script: a recipe resumes from its snapshots")
    if json is not None:
        check_place("--json", json)
        _refuse_other_json(json)
    if html is not None:
        from paceline.report.verification import check_page_place

        check_place("--html", html)
        check_page_place(html)
        if json is not None and json.absolute() == html.absolute():
            raise UsageError(f"--json and --html both say {html}: give two files")


def _refuse_other_json(path: Path) -> None:
    """Refuse to write over a file that isn't a verification's.

    Raises:
        UsageError: It is one; an empty file isn't.
    """
    with suppress(OSError, ValueError):
        if not path.stat().st_size or "verdict" in read_json_object(path):
            return
    if path.exists():
        raise UsageError(f"--json {path} is there already, and not of paceline verify: move it")


def _training(
    target: Target,
    given: Mapping[str, OptionValue],
    of_file: Container[str],
    command: LaunchCommand | None,
) -> TrainRequest:
    """Return the training that is verified: of a recipe, a script or a module."""
    recipe, name = target.recipe, target.name
    own = {argument.name for argument in recipe.arguments()} if recipe is not None else set()
    if recipe is not None:
        reference = absolute_reference(reference_of(name))
    elif command is not None and command.is_module:
        reference = name
    else:
        path = Path(name).expanduser().absolute()
        name, reference = path.name, str(path)
    return TrainRequest(
        kind="recipe" if recipe is not None else "script",
        recipe=name,
        reference=reference,
        arguments=recipe.resolved({n: v for n, v in given.items() if n in own}) if recipe else {},
        script_args=target.script_args,
        settings=merge_layers(
            {n: v for n, v in given.items() if n not in own}, of_file, target.settings
        ),
        given=tuple(given),
        command=(),
    )


def _verify(request: VerifyRequest, place: Path) -> int:
    from paceline.verify.study import verify_counts, verify_resume
    from paceline.verify.text_report import Times

    on_cpu, command = _is_on_cpu(request), request.command
    if on_cpu and command is not None and command.launcher == "accelerate":
        note(
            "On the CPU accelerate launch starts one process, whatever --num_processes says. Here "
            f"{in_words([str(n) for n in request.workers])} are started, as it does on GPUs"
        )
    launcher = VerifyLauncher(request, place, on_cpu)
    started_s = time.monotonic()
    verify = verify_resume if request.options.resume else verify_counts
    report, launches = verify(launcher)
    times = Times(took_s=time.monotonic() - started_s, launches=launches)
    print(printable(f"{report.as_text()}\n\n{times.as_text()}"), flush=True)
    _, first = launches[0]
    return _keep(request, report.as_json() | times.as_json(), first)


def _keep(request: VerifyRequest, content: Mapping[str, object], first: "Trace") -> ExitCode:
    """Write what was found to where the user wants it, and give the exit code."""
    code = ExitCode.DONE if content["is_good"] else ExitCode.JOB
    ran = {
        "target": request.training.recipe,
        "command": list(request.training.command),
        "directory": str(Path.cwd()),
        "started_at": request.training.started_at,
        "workers": list(request.workers),
        "steps": request.options.steps,
        "epochs": request.options.epochs,
        "paceline": __version__,
        "torch": first.torch,
    }
    record = {**content, "exit_code": int(code), "ran": ran}
    if request.options.format == "github" and (lines := github_annotations(record, Path.cwd())):
        print(printable(lines), flush=True)
    json, html = request.options.json_file, request.options.html_file
    if json is not None:
        with writing(json):
            write_json(json, record)
    if html is not None:
        from paceline.report.verification import write_verification

        write_verification(record, html.absolute())
    return code


def _is_on_cpu(request: VerifyRequest) -> bool:
    dist, command = request.config.dist, request.command
    if command is not None and command.requests_cpu:
        return True
    # The command may set which GPUs its workers see.
    visible = command.variables.get("CUDA_VISIBLE_DEVICES") if command else None
    most = max(request.workers)
    if visible is not None and len([name for name in visible.split(",") if name.strip()]) < most:
        return True
    return count_gpus(dist.device, dist.backend) < most
