"""`paceline run SCRIPT.py`: runs a training script of the user's own on N workers."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from paceline.cli.cluster_submit import cluster_options, take_cluster_choice
from paceline.cli.commands.train import (
    RUN_DIR,
    begin,
    holding_training,
    print_config,
    resume_begun,
)
from paceline.cli.output import TRAIN_OUTPUT, Output
from paceline.cli.target import config_named, merge_layers, refuse_another, script_hint, script_of
from paceline.errors import ExitCode, UsageError
from paceline.options.command_line import (
    names_something,
    part_script_args,
    read_options,
    show_help,
    wants_help,
)
from paceline.options.config_file import CONFIG, PRINT_CONFIG, ConfigFile
from paceline.options.shell import command_line
from paceline.recipes.registry import BUILT_IN
from paceline.training.config import TrainConfig, TrainRequest, training_options

_USAGE = "paceline run SCRIPT.py [options] [-- the script's own arguments]"
_ABOUT = (
    "Run a training script on N workers, each of them as `python SCRIPT.py` would run it; a script "
    "that uses `paceline.session()` trains the same on any number. The script's own arguments come "
    "after --. An option can also be given in the environment: PACELINE_PRECISION for --precision."
)


def main(tokens: Sequence[str]) -> int:
    """Run the command."""
    from paceline.runtime.script_options import (
        refuse_of_recipes,
        script_options,
        warn_of_variables,
    )

    # The script, its own arguments, and options before or behind it.
    own, arguments = part_script_args(tokens)
    own_options = [RUN_DIR, CONFIG, PRINT_CONFIG, *TRAIN_OUTPUT, *cluster_options()]
    options = [*script_options().values(), *own_options]
    if wants_help(own):
        show_help(_USAGE, _ABOUT, options, own)
    file = config_named(own)
    script, own = _take_script(own, file)
    if file is not None and script == file.script and "--" not in tokens:
        arguments = file.script_args
    refuse_another(f"the command names {script}", None, file)
    command = shlex.join(("paceline", "run", script))
    hint = script_hint(command)
    refuse_of_recipes(own, hint.removeprefix(". "))
    parsed = read_options(command, _ABOUT, own, options, hint)
    warn_of_variables([*training_options().values(), *options], is_script=True)
    if begun := holding_training(parsed):
        return resume_begun(begun, parsed, "script", Path(script).name, arguments)
    given = merge_layers(parsed.values, parsed.of_file(), {})
    given.pop("config", None)
    output, prints = Output.take(given), given.pop("print_config", False)
    output.quieten(given)
    # What is the command's own isn't the training's.
    choice, where = take_cluster_choice(given), given.pop("run_dir", None)
    request = TrainRequest(
        kind="script",
        recipe=Path(script).name,
        reference=str(Path(script).expanduser().absolute()),
        script_args=arguments,
        settings=given,
        given=(*given, *(("run_dir",) if where is not None else ())),
        command=("paceline", "run", *tokens),
    )
    if prints:
        print_config(request)
        return ExitCode.DONE
    with parsed.placed():
        config = TrainConfig.from_settings(given)
    plans = choice.plans_alone(config.launch.on)
    output.print_settings(request, parsed.sources, dry_run=plans)
    return begin(script, request, config, choice, given, where, output=output)


def _take_script(tokens: Sequence[str], config: ConfigFile | None) -> tuple[str, Sequence[str]]:
    """Take the script's path out of the options, before or behind it.

    Args:
        config: The file of `--config`: the `run.json` of a script names it where they don't.

    Returns:
        The script, and the other words.

    Raises:
        UsageError: There is none, or it is no file.
    """
    if "-m" in tokens:
        raise UsageError(
            "paceline run takes the file of a script. A module of a package (-m) is started by "
            "`torchrun --nproc-per-node 2 -m PACKAGE.MODULE ...`, or by a file beside the package "
            "that imports and calls its main function"
        )
    for place, token in enumerate(tokens):
        is_first = place == 0 and names_something(tokens)  # it needs no .py
        if is_first or (token.endswith(".py") and not token.startswith("-")):
            path = Path(token).expanduser()
            if path.is_dir():
                raise UsageError(f"{token} is a directory: name the script in it that trains")
            if not path.is_file() and (token in BUILT_IN or ".py:" in token):
                trains_it = command_line("train", token)
                raise UsageError(f"{token} is a recipe, not a script: {trains_it} trains it")
            if not path.is_file():
                raise UsageError(f"there is no file {token}. Usage: {_USAGE}")
            if path.suffix == ".toml":
                raise UsageError(
                    f"{token} is a file of settings, not a script: give it after --config"
                )
            return token, [*tokens[:place], *tokens[place + 1 :]]
    if config is not None and config.recipe is not None:
        trains_it = command_line("train", "--config", str(config.path))
        raise UsageError(f"{config.path} is for the recipe {config.recipe}: {trains_it} trains it")
    if config is not None and config.script is not None:
        return script_of(config), tokens
    read_by_all = "each worker reads the script, so it can't come from standard input"
    missing = read_by_all if "-" in tokens else "the script is missing"
    raise UsageError(f"{missing}. Usage: {_USAGE}")
