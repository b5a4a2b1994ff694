"""`paceline run SCRIPT.py`: runs a training script of the user's own on N workers."""

import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from paceline.cli.cluster_submit import cluster_options, run_dir_there, submit, take_cluster_choice
from paceline.cli.train import RUN_DIR, file_name
from paceline.errors import UsageError
from paceline.launch.registry import launchers
from paceline.options.command_line import (
    parse_options,
    part_script_args,
    show_help,
    wants_help,
    words,
)
from paceline.results.run_directory import RunDirectory
from paceline.runtime.placement import choose_place
from paceline.runtime.spec import Launch
from paceline.runtime.start import start, warn_of_no_effect
from paceline.training.config import TrainConfig
from paceline.training.request import TrainRequest

SCRIPT_ENTRY = "paceline.script.entry:run_script"

_USAGE = "paceline run SCRIPT.py [options] [-- the script's own arguments]"
_ABOUT = (
    "Run a training script on N workers, each of them as `python SCRIPT.py` would run it; a script "
    "that uses `paceline.session()` trains the same on any number. The script's own arguments come "
    "after --. An option can also be given in the environment: PACELINE_PRECISION for --precision."
)


def main(tokens: Sequence[str]) -> int:
    """Run the command."""
    from paceline.runtime.script_options import script_options

    own, arguments = part_script_args(tokens)
    options = [*script_options().values(), RUN_DIR, *cluster_options()]
    if wants_help(own):
        return show_help(_USAGE, _ABOUT, options)
    script, own = _take_script(own)
    given = parse_options(shlex.join(("paceline", "run", script)), _ABOUT, own, options)
    elsewhere = take_cluster_choice(given)
    where = given.pop("run_dir", None)
    config = TrainConfig.from_settings(given)
    name = file_name(Path(script).stem)
    if config.launch.on in launchers():
        run_dir = str(where or run_dir_there(name))
        sent = {n: v for n, v in given.items() if n != "on"} | {"run_dir": run_dir}
        command = ("paceline", "run", script, *words(sent), "--", *arguments)
        return submit(elsewhere, config, command, name, run_dir)
    elsewhere.check(config.launch.on)
    place = choose_place(config, hosts=elsewhere.hosts)
    if place.rank == 0:
        warn_of_no_effect(place, tuple(given))
    run = RunDirectory.usual(name, place.started_at())
    if where is not None:
        run = RunDirectory.named(str(where))
    request = TrainRequest(
        kind="script",
        recipe=Path(script).name,
        reference=str(Path(script).expanduser().absolute()),
        arguments={},
        script_args=arguments,
        settings=given,
        given=(*given, *(("run_dir",) if where is not None else ())),
        run_dir=str(run.path),
        command=("paceline", "run", *tokens),
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    return start(
        Launch(
            request=request,
            config=config,
            run=run,
            place=place,
            is_new=True,
            is_named=where is not None,
            entry=SCRIPT_ENTRY,
        )
    )


def _take_script(tokens: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Take the script's path out of the options, before or behind it.

    Raises:
        UsageError: There is none, or no such file.
    """
    for place, token in enumerate(tokens):
        if token.endswith(".py") and not token.startswith("-"):
            if not Path(token).expanduser().is_file():
                raise UsageError(f"there is no file {token}")
            return token, [*tokens[:place], *tokens[place + 1 :]]
    raise UsageError(f"the script is missing. Usage: {_USAGE}")
