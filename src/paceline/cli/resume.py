"""`paceline resume RUN_DIR`: goes on exactly where a training stopped, in mid-epoch as well."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from paceline.cli.options import show_help, take_word, wants_help
from paceline.cli.start import Launch, choose_place, start
from paceline.cli.train import parse_recipe_options
from paceline.config.fields import OptionField
from paceline.config.rundir import RunDirectory
from paceline.trainer.config import TrainConfig, training_options
from paceline.trainer.past import PastRun
from paceline.trainer.recipe import load_recipe
from paceline.trainer.request import TrainRequest

_ALLOW = OptionField(
    name="allow_change",
    annotation=tuple[str, ...],
    default=(),
    help="An option that may differ from the run's although it changes what is trained, for "
    "example: --epochs 20 --allow-change epochs. Repeat it for each.",
    group="Resuming",
)

_ABOUT = (
    "Go on exactly where a training stopped, in the middle of an epoch as well. Options are the "
    "run's own; those that change what is trained need --allow-change."
)


def main(tokens: Sequence[str]) -> int:
    """Run the command."""
    if wants_help(tokens):
        options = [*training_options().values(), _ALLOW]
        return show_help("paceline resume RUN_DIR", _ABOUT, options)
    where, rest = take_word(tokens, "paceline resume RUN_DIR", "the run directory")
    run = RunDirectory.named(where)
    past = PastRun.read(run)
    recipe = load_recipe(past.reference)
    given = parse_recipe_options(f"paceline resume {where}", recipe, rest, [_ALLOW])
    allowed = given.pop("allow_change", ())
    names = [str(name) for name in allowed] if isinstance(allowed, tuple | list) else []
    paths = recipe.path_arguments()
    given |= {n: str(Path(str(v)).absolute()) for n, v in given.items() if n in paths}
    names = [name.replace("-", "_") for name in names]
    settings, arguments = past.changed(given, names, paths)
    config = TrainConfig.from_settings(settings)
    place = choose_place(config, usual_workers=past.world_size)
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
    return start(Launch(request=request, config=config, run=run, place=place, is_new=False))
