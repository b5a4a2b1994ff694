"""`paceline recipes`: lists the built-in recipes."""

from collections.abc import Sequence

from paceline.errors import ExitCode
from paceline.options.command_line import parse_options
from paceline.recipes.registry import BUILT_IN, DEFAULT
from paceline.training.recipe import load_recipe

_ABOUT = "List the built-in recipes, a line each."


def main(tokens: Sequence[str]) -> int:
    """Run the command."""
    parse_options("paceline recipes", _ABOUT, tokens, ())
    width = max(map(len, BUILT_IN))
    for name, reference in BUILT_IN.items():
        default = " (the default)" if name == DEFAULT else ""
        print(f"{name:{width}}  {load_recipe(reference).summary}{default}")
    print("\nOptions of one: paceline train NAME --help. Your own: paceline train FILE.py:FUNCTION")
    return ExitCode.DONE
