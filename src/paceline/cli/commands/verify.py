"""`paceline verify`: is a training the same on any number of workers? Trains on each, compares."""

import time
from collections.abc import Container, Mapping, Sequence
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
    refuse_script_args,
    show_help,
    wants_help,
)
from paceline.options.config_file import CONFIG
from paceline.options.fields import OptionField, OptionValue, option_fields, pick
from paceline.options.figures import listed as in_words
from paceline.options.quantities import parse_count
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
    "With --resume one number of workers is trained on, killed and started again: does it resume "
    "as if nothing had been? "
    "Exit code 0: the same bits, or the same to rounding; 65: something differs or is wrong."
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
    request = _read(tokens)
    training = replace(request.training, command=("paceline", "verify", *tokens))
    request = replace(request, training=training)
    with scratch_directory() as place:
        return _verify(request, place)


def _read(tokens: Sequence[str]) -> VerifyRequest:
    """Read the command line."""
    own, script_args = part_script_args(tokens)
    if "-m" in own:
        raise UsageError(
            "a module (-m) is verified by the command that starts it, after --: `paceline verify "
            "-- torchrun --nproc-per-node 2 -m PACKAGE.MODULE ...`"
        )
    # Without a name, what stands after -- is a launching command, with a script's run.json too.
    names_script = any(word.endswith(".py") for word in own)
    if "--" in tokens and not names_script and not names_something(own):
        return _read_command(own, read_launch_command(script_args))
    # What to verify decides which options there are.
    if names_something(own):
        _refuse_no_training(own)
    target = Target.read(tokens, _USAGE, "what to verify")
    recipe = target.recipe
    listed = _listed_options(recipe)
    command = command_line("verify", target.name)
    if wants_help(target.own):
        show_help(command, _ABOUT, listed, target.own)
    refuse_script_args(() if target.is_script else target.script_args)
    # Settings of the training, without those of this command.
    parsed = read_options(command, _ABOUT, target.own, listed, target.hint(command), _NOT_OURS)
    given = parsed.values
    settings = {n: v for n, v in given.items() if n not in _OWN}
    if recipe is None:
        settings = merge_layers(settings, parsed.of_file(), {})
        request = _script_request(target.name, settings, target.script_args)
    else:
        request = _recipe_request(target.name, recipe, settings, parsed.of_file())
    with parsed.placed():
        config = TrainConfig.from_settings(request.settings)
    # The numbers of workers, each of which must be able to share the batch.
    options = pick(VerifyOptions, given)
    numbers = "1" if options.resume and "workers" not in given else options.workers
    workers = _numbers(numbers, single=options.resume)
    counts = (*workers, *([options.resume_workers] if options.resume_workers else []))
    check_machine(max(counts))
    for count in counts if recipe is not None else ():
        choose_global_batch(config.data, count)
    return _checked(
        VerifyRequest(training=request, config=config, workers=workers, options=options)
    )


def _refuse_no_training(words: Sequence[str]) -> None:
    """Refuse what is neither a recipe nor a script, but is often given.

    Raises:
        UsageError: It is a launcher, or the directory of a run.
    """
    name = words[0]
    if find_launcher(words):
        raise UsageError(
            f"{name} is no recipe: a launching command comes after --, and options before that: "
            f"`paceline verify -- {name} ...`"
        )
    if RunDirectory.named(name).run_json.exists():
        raise UsageError(f"{name} is a run directory: give the recipe or the script it is of")


def _read_command(tokens: Sequence[str], command: LaunchCommand) -> VerifyRequest:
    """Read the options that stand before a launching command."""
    listed = _listed_options()
    refuse_another(f"the command names {command.script}", None, config_named(tokens))
    parsed = read_options("paceline verify", _ABOUT, tokens, listed, settled=_NOT_OURS)
    given = parsed.values
    settings = {n: v for n, v in given.items() if n not in _OWN}
    settings = merge_layers(settings, parsed.of_file(), {})
    options = pick(VerifyOptions, given)
    # Where --workers isn't given, the command itself may say how many workers it starts.
    numbers = options.workers if "workers" in given else ""
    workers = _numbers_of(command, numbers, single=options.resume)
    check_machine(max(workers))
    if command.has_launcher and (others := left_out(command)):
        note(f"left out of the command, since all is run on this machine, once: {in_words(others)}")
    request = _script_request(
        command.script, settings, command.arguments, is_module=command.is_module
    )
    config = TrainConfig.from_settings(request.settings)
    return _checked(
        VerifyRequest(
            training=request, config=config, workers=workers, options=options, command=command
        )
    )


def _numbers_of(command: LaunchCommand, given: str, *, single: bool) -> tuple[int, ...]:
    """Say on how many workers a command is run: the user's numbers, or one and what it says."""
    if single and (given or command.workers):
        return _numbers(given or str(command.workers), single=True)
    if given:
        return _numbers(given if "," in given or given.strip() == "1" else f"1,{given}")
    count = command.workers
    if count is not None and count > 1:
        return (1, count)
    if count is None and command.follows_workers:
        return (1,) if single else _numbers(COUNTS)
    what = "starts one worker" if count else "doesn't say in figures how many workers it starts"
    example = "2" if single else COUNTS
    raise UsageError(f"the command {what}: give --workers before --, such as --workers {example}")


def _listed_options(recipe: Recipe | None = None) -> list[OptionField]:
    of_training = list_training_options(recipe, is_script=recipe is None, without=_NOT_OURS)
    return [*_OPTIONS, CONFIG, *of_training]


def _numbers(text: str, *, single: bool = False) -> tuple[int, ...]:
    numbers: list[int] = []
    for word in (word.strip() for word in text.split(",") if word.strip()):
        number = parse_count(word)
        if number is None:
            wrong = f"{word!r} is no number"
        elif number < 1:
            wrong = f"{word} is less than 1"
        elif number in numbers:
            wrong = f"{number} stands there twice"
        else:
            numbers.append(number)
            continue
        raise UsageError(f"--workers is {text}, but {wrong}: give numbers of workers, such as 1,2")
    if single and len(numbers) != 1:
        raise UsageError(f"--workers is {text}: with --resume it is a single number, such as 2")
    if len(numbers) < 2 and not single:
        raise UsageError(f"--workers is {text}: give at least two numbers of workers, such as 1,2")
    return tuple(numbers)


def _checked(request: VerifyRequest) -> VerifyRequest:
    """Refuse what would fail after minutes of training only."""
    shards, again = request.config.data.shards, request.options.resume_workers
    most = max(*request.workers, again or 1)
    if shards is not None and most > shards:
        name = "--resume-workers" if most == again else "--workers"
        raise UsageError(
            f"{name} says {most}, more than --shards {shards}: give at least {most} shards, "
            "or fewer workers"
        )
    if request.options.resume_words and request.training.kind == "recipe":
        raise UsageError("--resume-args are for a script: a recipe resumes from its snapshots")
    json, html = request.options.json_file, request.options.html_file
    for option, place in (("--json", json), ("--html", html)):
        if place is not None:
            check_place(option, place)
    if json is not None:
        _refuse_other_json(json)
    if html is not None:
        if json is not None and json.absolute() == html.absolute():
            raise UsageError(f"--json and --html both say {html}: give two files")
        from paceline.report.verification import check_page_place

        check_page_place(html)
    return request


def _refuse_other_json(path: Path) -> None:
    """Refuse to write over a file that isn't a verification's.

    Raises:
        UsageError: It is one; an empty file isn't.
    """
    if not path.is_file() or not path.stat().st_size:
        return
    try:
        is_ours = "verdict" in read_json_object(path)
    except (OSError, ValueError):
        is_ours = False
    if not is_ours:
        raise UsageError(f"--json {path} is there already, and not of paceline verify: move it")


def _script_request(
    target: str,
    settings: Mapping[str, OptionValue],
    arguments: Sequence[str],
    *,
    is_module: bool = False,
) -> TrainRequest:
    path = Path(target).expanduser().absolute()
    if not (is_module or path.is_file()):
        raise UsageError(f"there is no file {target}")
    return TrainRequest(
        kind="script",
        recipe=target if is_module else path.name,
        reference=target if is_module else str(path),
        script_args=tuple(arguments),
        settings=settings,
        given=tuple(settings),
        command=("paceline", "verify", target),
    )


def _recipe_request(
    target: str, recipe: Recipe, given: Mapping[str, OptionValue], of_file: Container[str]
) -> TrainRequest:
    own = {argument.name for argument in recipe.arguments()}
    options = {n: v for n, v in given.items() if n not in own}
    return TrainRequest(
        recipe=target,
        reference=absolute_reference(reference_of(target)),
        arguments=recipe.resolved({n: v for n, v in given.items() if n in own}),
        settings=merge_layers(options, of_file, recipe.settings),
        given=tuple(given),
        command=("paceline", "verify", target),
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
    text, content, launches = verify(launcher)
    times = Times(took_s=time.monotonic() - started_s, launches=launches)
    print(printable(f"{text}\n\n{times.as_text()}"), flush=True)
    _, first = launches[0]
    return _keep(request, content | times.as_json(), first)


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
