"""A recipe: a function that returns a `Job`, with the settings it is meant to be trained with."""

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Literal, final, get_args, get_origin, get_type_hints, overload

from docstring_parser import parse

from paceline.errors import JobError, PacelineError, UsageError
from paceline.options.fields import OptionField, OptionValue, check_names, check_values

if TYPE_CHECKING:
    from paceline.training.job import Job


@final
@dataclass(frozen=True)
class Recipe:
    """A function that builds a `Job`; its keyword arguments are flags of `paceline train`."""

    name: str
    build: "Callable[..., Job]"
    settings: Mapping[str, OptionValue] = field(default_factory=dict)
    """Options of training that this recipe sets; the command line overrides them."""

    @property
    def summary(self) -> str:
        """The first line of the function's docstring."""
        return (inspect.getdoc(self.build) or "").partition("\n")[0]

    def arguments(self) -> tuple[OptionField, ...]:
        """List the function's keyword arguments as options, with help from its docstring.

        Raises:
            UsageError: No flag can stand for an argument: it has no default or no name, or its
                annotation can't be read.
        """
        hints = _argument_types(self.build)
        text = {
            p.arg_name: p.description or "" for p in parse(inspect.getdoc(self.build) or "").params
        }
        listed = []
        for name, parameter in inspect.signature(self.build).parameters.items():
            if parameter.kind in _NO_FLAG:
                raise UsageError(
                    f"recipe {self.name!r}: {_NO_FLAG[parameter.kind].format(name)} can't be a "
                    "flag; name each argument and give it a default value, for example "
                    "`*, width: int = 64`"
                )
            if parameter.default is inspect.Parameter.empty:
                raise UsageError(
                    f"recipe {self.name!r}: the argument {name!r} needs a default value, "
                    "since each argument is a flag"
                )
            annotation = hints.get(name, type(parameter.default))
            listed.append(
                OptionField(
                    name=name,
                    annotation=annotation,
                    default=parameter.default,
                    help=" ".join(text.get(name, "").split()),
                    group=f"Recipe {self.name}",
                    is_own=False,
                )
            )
        return tuple(listed)

    def __call__(self, **arguments: OptionValue) -> "Job":
        """Build the job.

        Raises:
            UsageError: An argument isn't one of the function's.
            JobError: The function returned something else.
        """
        from paceline.training.job import Job  # imports torch

        known = [argument.name for argument in self.arguments()]
        check_names(arguments, known, f"argument of recipe {self.name!r}")
        paths = self.paths_among(arguments)
        made = {n: _path(v) for n, v in arguments.items() if n in paths}
        job: object = self.build(**{**arguments, **made})
        if not isinstance(job, Job):
            raise JobError(
                f"the function of the recipe {self.name} must return a paceline.Job; it returned "
                f"{'nothing' if job is None else f'a value of type {type(job).__name__}'}"
            )
        return job

    def resolved(self, given: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
        """Put given arguments over the defaults, and make paths absolute.

        So that a training that is resumed from another directory, or after a default has changed,
        is still the same.
        """
        plain = (str, int, float, bool, tuple, Path, type(None))
        defaults = {a.name: a.default for a in self.arguments() if isinstance(a.default, plain)}
        named = defaults | dict(given)
        check_values(named, ())
        made = self.with_absolute_paths(named)
        for name, value in made.items():
            if not isinstance(value, (str, int, float, bool, tuple, type(None))):
                raise UsageError(
                    f"recipe {self.name!r}: the argument {name!r} is a {type(value).__name__}; "
                    "arguments are text, numbers, True or False, None, paths, or tuples of these"
                )
        return made

    def with_absolute_paths(self, arguments: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
        """Make the paths among given arguments independent of the working directory."""
        paths = self.paths_among(arguments)
        return {n: str(_path(v).absolute()) if n in paths else v for n, v in arguments.items()}

    def path_arguments(self) -> set[str]:
        """Name the arguments that are paths: where data is, not what it is."""
        return {a.name for a in self.arguments() if _is_path(a)}

    def paths_among(self, given: Mapping[str, OptionValue]) -> set[str]:
        """Name the given arguments that are paths, not None or a word that may stand for one."""
        annotations = {a.name: a.annotation for a in self.arguments() if _is_path(a)}
        return {
            name
            for name, annotation in annotations.items()
            if given.get(name) is not None and given[name] not in _words(annotation)
        }


_NO_FLAG = {
    inspect.Parameter.VAR_POSITIONAL: "*{}",
    inspect.Parameter.VAR_KEYWORD: "**{}",
    inspect.Parameter.POSITIONAL_ONLY: "the positional argument {}",
}


@overload
def recipe(build: "Callable[..., Job]", /) -> Recipe: ...


@overload
def recipe(**settings: OptionValue) -> "Callable[[Callable[..., Job]], Recipe]": ...


def recipe(
    build: "Callable[..., Job] | None" = None, /, **settings: OptionValue
) -> "Recipe | Callable[[Callable[..., Job]], Recipe]":
    """Make a recipe of a function, with the options of training that it is meant for.

    Args:
        build: The function, where the decorator stands without parentheses.
        settings: Options by their Python names, for example `epochs=5, optimizer="adadelta"`.

    Example:
        @paceline.recipe(epochs=5, global_batch=128, lr=0.1)
        def build(*, width: int = 64) -> paceline.Job: ...
    """

    def decorate(build: "Callable[..., Job]") -> Recipe:
        name = build.__name__.replace("_", "-")
        return Recipe(name=name, build=build, settings=settings)

    return decorate if build is None else decorate(build)


def _is_path(argument: OptionField) -> bool:
    return (
        isinstance(argument.default, Path)
        or argument.annotation is Path
        or Path in get_args(argument.annotation)
    )


def _words(annotation: object) -> tuple[object, ...]:
    """List the literals of a union such as `Literal["none"] | Path`."""
    closed = (part for part in get_args(annotation) if get_origin(part) is Literal)
    return tuple(word for part in closed for word in get_args(part))


def _argument_types(build: Callable[..., object]) -> dict[str, object]:
    """Evaluate the annotations of a function's arguments; its return type may be unknown here."""
    written = {n: a for n, a in inspect.get_annotations(build).items() if n != "return"}
    holder = type("Arguments", (), {"__annotations__": written, "__module__": build.__module__})
    names = getattr(inspect.unwrap(build), "__globals__", {})
    try:
        return get_type_hints(holder, globalns=names, include_extras=True)
    except NameError as error:
        raise UsageError(
            f"the annotation of an argument of {build.__name__} can't be read: {error}"
        ) from error


def _path(value: object) -> Path:
    return Path(str(value)).expanduser()


def absolute_reference(reference: str) -> str:
    """Make a reference to a file independent of the working directory."""
    place, _, name = reference.rpartition(":")
    return f"{Path(place).expanduser().absolute()}:{name}" if place.endswith(".py") else reference


def load_recipe(reference: str) -> Recipe:
    """Find a recipe in a file or a module.

    Args:
        reference: `path/to/file.py:function` or `package.module:function`. The function may be a
            plain one or made by `recipe`.

    Raises:
        UsageError: There is no such file, module or function; the message lists what there is.
        JobError: The file or module fails when it is imported; the message is its own traceback.
    """
    place, colon, name = reference.rpartition(":")
    if not colon or not place or not name:
        raise UsageError(
            f"{reference!r} names no recipe. Give a built-in one (see `paceline recipes`), "
            "or your own as file.py:function"
        )
    module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    # A plain function counts as a recipe without settings of its own.
    found = vars(module).get(name)
    if isinstance(found, Recipe):
        return found
    if inspect.isfunction(found):
        return Recipe(name=reference, build=found)
    functions = [n for n, v in vars(module).items() if _can_be_recipe(v, module)]
    raise UsageError(
        f"{place} has no function {name!r}. Its functions: {', '.join(functions) or 'none'}"
    )


def _can_be_recipe(value: object, module: ModuleType) -> bool:
    if isinstance(value, Recipe):
        return True
    return inspect.isfunction(value) and value.__module__ == module.__name__


def _import_file(path: Path) -> ModuleType:
    """Import a user's file as it would be run as a script: its directory is on the path."""
    path = path.expanduser().absolute()
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    # Under its own name where that is free; a file that is imported already isn't run again.
    name = path.stem
    known = sys.modules.get(name)
    if known is not None and known.__file__ == str(path):
        return known
    if known is not None or name in sys.stdlib_module_names:
        name = f"paceline_user_{name}"
    # Its neighbours can be imported, as when it is run as a script.
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} can't be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    # A module whose import failed must not be found half-built by the next import.
    try:
        spec.loader.exec_module(module)
    except PacelineError:
        del sys.modules[name]
        raise
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _failed_import(str(path), error) from error
    return module


def _import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise UsageError(f"there is no module {name!r}") from error
        raise _failed_import(name, error) from error
    except PacelineError:
        raise
    except (Exception, SystemExit) as error:
        raise _failed_import(name, error) from error


def _failed_import(what: str, error: BaseException) -> JobError:
    """Tell of an import that failed, with the user's frames alone."""
    frames = error.__traceback__
    while frames is not None and _is_importing(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    return JobError(f"{what} fails when it is imported:\n{text.rstrip()}")


def _is_importing(filename: str) -> bool:
    """Tell whether a frame belongs to this module or to Python's own import."""
    return filename in (__file__, importlib.__file__) or filename.startswith("<frozen ")
