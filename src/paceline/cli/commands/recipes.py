"""`paceline recipes`: lists the built-in recipes."""

import sys
from collections.abc import Mapping, Sequence

from paceline.cli.output import Output, output_options, print_json
from paceline.errors import ExitCode
from paceline.options.command_line import flag, read_options
from paceline.options.figures import show_value
from paceline.options.text import fitting, line_width, wrapped
from paceline.recipes.registry import BUILT_IN, DEFAULT
from paceline.training.recipe import Recipe, load_recipe

_ABOUT = "List the built-in recipes, a line each."
_OPTIONS = output_options(
    "Print the names alone, a line each.",
    "Also print each recipe's own arguments and the settings that it makes.",
    "Print all of it as one JSON object on standard output.",
)


def main(tokens: Sequence[str]) -> int:
    """Run the command."""
    output = Output.take(read_options("paceline recipes", _ABOUT, tokens, _OPTIONS).values)
    recipes = {name: load_recipe(reference) for name, reference in BUILT_IN.items()}
    if output.json:
        print_json({name: _described(recipe) for name, recipe in recipes.items()})
        return ExitCode.DONE
    if output.quiet:
        print("\n".join(recipes))
        return ExitCode.DONE
    # For people: a line each, with --verbose also its arguments.
    width = max(map(len, recipes))
    for name, recipe in recipes.items():
        default = " (the default)" if name == DEFAULT else ""
        line = f"{name:{width}}  {recipe.summary}{default}"
        print("\n".join(wrapped(line, line_width(sys.maxsize), " " * (width + 2))))
        if output.verbose:
            _show_settings(recipe)
    how = "Options of one: paceline train NAME --help. Your own: paceline train FILE.py:FUNCTION"
    print(f"\n{fitting(how, sys.stdout)}")
    return ExitCode.DONE


def _described(recipe: Recipe) -> Mapping[str, object]:
    return {
        "summary": recipe.summary,
        "arguments": {option.name: _plain(option.default) for option in recipe.arguments()},
        "settings": {name: _plain(value) for name, value in recipe.settings.items()},
    }


def _plain(value: object) -> object:
    """Give what JSON can carry; a path, say, as text."""
    return value if value is None or isinstance(value, bool | int | float | tuple) else str(value)


def _show_settings(recipe: Recipe) -> None:
    for option in recipe.arguments():
        print(f"    {flag(option.name)} {show_value(_plain(option.default))}  (its own)")
    for name, value in recipe.settings.items():
        print(f"    {flag(name)} {show_value(value)}")
