"""The built-in recipes by name."""

from collections.abc import Mapping

from paceline.config.fields import unknown_name
from paceline.errors import UsageError

DEFAULT = "digits"
"""What `paceline train` alone trains."""

BUILT_IN: Mapping[str, str] = {
    "digits": "paceline.recipes.digits:digits",
    "mnist": "paceline.recipes.mnist:mnist",
    "synthetic": "paceline.recipes.synthetic:synthetic",
}
"""Name -> where the recipe is."""


def reference_of(name: str) -> str:
    """Turn what the user wrote into where the recipe is.

    Args:
        name: A built-in recipe's name, or `file.py:function` or `package.module:function`.

    Raises:
        UsageError: It is neither; the message lists the built-in ones.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    if ":" not in name:
        hint = "; or your own as file.py:function"
        raise UsageError(unknown_name(name, BUILT_IN, "recipe") + hint)
    return name
