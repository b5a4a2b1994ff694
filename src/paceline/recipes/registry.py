"""The built-in recipes by name."""

from collections.abc import Mapping

from paceline.errors import UsageError
from paceline.options.fields import unknown_name

DEFAULT = "digits"
"""What `paceline train` alone trains."""

BUILT_IN: Mapping[str, str] = {
    "digits": "paceline.recipes.digits:digits",
    "mnist": "paceline.recipes.mnist:mnist",
    "fashion-wideresnet": "paceline.recipes.fashion_wideresnet:fashion_wideresnet",
    "cifar10-wideresnet": "paceline.recipes.cifar10_wideresnet:cifar10_wideresnet",
    "stl10-resnet18": "paceline.recipes.stl10_resnet18:stl10_resnet18",
    "imagefolder-vgg19": "paceline.recipes.imagefolder_vgg19:imagefolder_vgg19",
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
    if name.endswith(".py"):
        raise UsageError(
            f"{name!r} is a file, not a recipe. Name its function that returns a paceline.Job, as "
            f"{name}:function; a script with a loop of its own runs by `paceline run {name}`"
        )
    if name.endswith(".toml"):
        raise UsageError(f"{name!r} is a file of settings, not a recipe: give it after --config")
    if ":" not in name:
        hint = "; or your own as file.py:function"
        raise UsageError(unknown_name(name, BUILT_IN, "recipe") + hint)
    return name
