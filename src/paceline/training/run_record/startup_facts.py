"""Facts that must be equal on all workers: versions, settings, data; compared at the start."""

import hashlib
import importlib.util
import platform
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from paceline._version import __version__
from paceline.distributed.options import OF_THIS_PROCESS
from paceline.launch.options import LaunchOptions
from paceline.options.fields import OptionValue
from paceline.training.config import TrainRequest

OF_ONE_NODE = (
    *OF_THIS_PROCESS,
    *(field.name for field in fields(LaunchOptions)),
    "device",
    "progress",
    "loader_workers",
)
"""Options that may differ between workers: where they stand, and what their node can do. Which
device and backend they come to is compared instead."""

_LIBRARIES = ("torch", "numpy", "torchvision")
_FIRST = 12


def facts_of(
    request: TrainRequest,
    settings: Mapping[str, OptionValue],
    *,
    device: str,
    backend: str,
    numerics: Mapping[str, object] | None = None,
) -> dict[str, str]:
    """List what has to be the same on all workers.

    Args:
        numerics: What the bits depend on besides, where bits are promised.
    """
    options = {n: _text(v) for n, v in settings.items() if n not in OF_ONE_NODE}
    arguments = {n: _text(v) for n, v in request.arguments.items() if not _names_a_place(v)}
    return {
        request.kind: _name_of(request),
        **options,
        **arguments,
        "script arguments": shlex.join(common_arguments(request.script_args)) or "none",
        "device": device,
        "backend": backend,
        **_code(request),
        **_versions(),
        **{name: _text(value) for name, value in (numerics or {}).items()},
    }


def code_and_versions(request: TrainRequest) -> dict[str, str]:
    """List what can be compared before anything of the user's is imported: code and versions."""
    return {**_code(request), **_versions()}


def common_arguments(arguments: Sequence[str]) -> list[str]:
    """Leave out of a script's arguments what may differ between workers: ranks and paths."""
    return list(_common(arguments))


def _common(arguments: Sequence[str]) -> Iterator[str]:
    skips = False
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if skips and not argument.startswith("-"):
            skips = False
            continue
        skips = False
        if name.startswith("-") and name.replace("_", "-").endswith("rank"):
            skips = not equals
        elif name.startswith("-") and equals and _names_a_place(value):
            yield f"{name}=PATH"
        else:
            yield "PATH" if _names_a_place(argument) else argument


def source_file(reference: str) -> Path | None:
    """Find the file of a recipe or script, without importing anything of it.

    Args:
        reference: `file.py:function`, `package.module:function`, or the path of a script.
    """
    place = reference if reference.endswith(".py") else reference.rpartition(":")[0]
    if place.endswith(".py") or not place:
        path = Path(place or reference)
        return path if path.is_file() else None
    package, *rest = place.split(".")
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        return None
    path = Path(found.origin)
    if rest:
        path = path.parent.joinpath(*rest)
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return path if path.is_file() else None


def _name_of(request: TrainRequest) -> str:
    if request.kind == "script":
        return Path(request.reference).name
    place, _, function = request.reference.rpartition(":")
    return f"{Path(place).name}:{function}" if place.endswith(".py") else request.reference


def _code(request: TrainRequest) -> dict[str, str]:
    path = source_file(request.reference)
    if path is None:
        return {}
    return {f"{path.name} with SHA-256": hashlib.sha256(path.read_bytes()).hexdigest()[:_FIRST]}


def _versions() -> dict[str, str]:
    found = {"Paceline": __version__, "Python": platform.python_version()}
    for library in _LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            found[library] = "none"
    return found


def _names_a_place(value: OptionValue) -> bool:
    return isinstance(value, str) and ("/" in value or "\\" in value)


def _text(value: object) -> str:
    if isinstance(value, tuple | list):
        return " ".join(map(_text, value))
    return "none" if value is None else str(value)
