"""`paceline preview RECIPE`: draws augmented training samples and test samples as PNG files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ExitCode, UsageError
from paceline.files import write_atomic, writing
from paceline.options.command_line import names_something, read_options
from paceline.options.fields import OptionField, option_fields, pick
from paceline.options.text import printable
from paceline.recipes.registry import DEFAULT, reference_of
from paceline.training.recipe import Recipe, load_recipe

_MAX_TILES = 1024
_ABOUT = (
    "Draw the first training samples of a recipe as the model will see them, augmented, and "
    "samples spread over the test set; each with its label."
)


@dataclass(frozen=True, kw_only=True)
class PreviewOptions:
    """What is drawn, and where it goes."""

    tiles: int = 64
    """How many samples each picture shows, 1 to 1024."""
    out: str = "preview.png"
    """Where the pictures go: with -train and -test added to the name."""
    seed: int = 0
    """The training's seed, which gives the order and the random changes."""
    overwrite: bool = False
    """Replace the files if they exist."""


_OPTIONS = option_fields(PreviewOptions, "Preview")


def main(tokens: Sequence[str]) -> int:
    """Run the command."""
    # The recipe's arguments are options of this command, beside its own.
    name, rest = (DEFAULT, tokens)
    if names_something(tokens):
        name, *rest = tokens
    recipe = load_recipe(reference_of(name))
    arguments = recipe.arguments()
    _check_names(recipe, arguments)
    given = read_options(f"paceline preview {name}", _ABOUT, rest, [*arguments, *_OPTIONS]).values
    own = pick(PreviewOptions, {"seed": recipe.settings.get("seed", 0)} | given)
    count, seed = own.tiles, own.seed
    if not 1 <= count <= _MAX_TILES:
        raise UsageError(f"--tiles should be 1 to {_MAX_TILES}, not {count}")
    paths = _paths(Path(own.out), overwrite=own.overwrite)
    from paceline.report.image_grid import Grid
    from paceline.report.preview import evaluation_tiles, training_tiles
    from paceline.training.rng import seed_everything

    # Build the job with the given arguments, its random augmentation seeded.
    seed_everything(seed)
    names = {argument.name for argument in arguments}
    job = recipe(**recipe.resolved({n: v for n, v in given.items() if n in names}))
    pictures = (
        (f"{name}: training, epoch 1, seed {seed}", training_tiles(job, seed, count)),
        (f"{name}: test", evaluation_tiles(job, count)),
    )
    # One picture of augmented training samples, one of the test set.
    for path, (title, tiles) in zip(paths, pictures, strict=True):
        _write(path, Grid(tiles).draw(title))
        print(printable(f"{len(tiles)} samples  {path}"))
    return ExitCode.DONE


def _check_names(recipe: Recipe, arguments: Sequence[OptionField]) -> None:
    clashing = {option.name for option in _OPTIONS} & {argument.name for argument in arguments}
    if clashing:
        raise UsageError(
            f"recipe {recipe.name!r}: its argument {min(clashing)!r} is an option of "
            "`paceline preview` already; give the argument another name"
        )


def _paths(out: Path, *, overwrite: bool) -> tuple[Path, Path]:
    """Name the two files, and refuse early what can't be written."""
    if out.suffix.lower() != ".png":
        raise UsageError(f"--out {out}: the pictures are PNG files, so let it end in .png")
    made = tuple(out.with_name(f"{out.stem}-{part}{out.suffix}") for part in ("train", "test"))
    with writing(out):  # a directory that nobody may enter
        there = [path for path in made if path.exists()]
        if there and not overwrite:
            raise UsageError(f"{there[0]} exists already; --overwrite replaces it")
        if not out.parent.is_dir():
            raise UsageError(f"there is no directory {out.parent}")
    return made[0], made[1]


def _write(path: Path, content: bytes) -> None:
    with writing(path):
        write_atomic(path, content)
