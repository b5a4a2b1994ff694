"""Options are frozen dataclasses with a docstring under each field; this reads them.

The command line, `--help`, `run.json` and the check for unknown names are made from them.
"""

import ast
import difflib
import inspect
import re
import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache, lru_cache
from itertools import pairwise
from math import isfinite
from pathlib import PurePath
from sys import float_info
from types import NoneType, UnionType
from typing import Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from paceline.errors import UsageError
from paceline.files import describe_json
from paceline.options.figures import listed as in_words
from paceline.options.text import shortened

LARGEST_NUMBER = 1e9
"""The most that an option can be which may be a fraction: a rate, a factor, seconds."""
LARGEST_COUNT = 10**12 - 1
"""The most that an option can be which counts something: names of snapshots have twelve digits."""

OptionValue = str | int | float | bool | tuple[object, ...] | None
"""What an option may hold: plain values that JSON and a command line can carry."""


Shape = TypeVar("Shape")
_TYPED = re.compile(r"--\w[\w-]*(?==|$)", re.ASCII)
_FREE_TEXT = ("--resume-args", "--note")
"""Options whose value may look like an option of somebody else's."""
_SENTENCE = re.compile(r"(?<=\.) (?=[A-Z0-9])")


@dataclass(frozen=True, kw_only=True)
class OptionField:
    """One option: the same name in Python, on the command line and in `run.json`."""

    name: str
    annotation: object
    default: OptionValue
    help: str
    group: str
    """Heading under which `--help` lists it."""
    is_own: bool = True
    """Whether it is an option of Paceline; an argument of a recipe means what its author says."""
    is_basic: bool = True
    """Whether `--help` shows it; `--help-all` shows every option."""
    shows_default: bool = True
    """Whether help shows the default; otherwise its text says what it depends on."""

    @property
    def summary(self) -> str:
        """What it does in one sentence, and the default where it is said in words."""
        first, *others = _SENTENCE.split(self.help)
        return " ".join([first, *(other for other in others if other.startswith("Default:"))])

    @property
    def num_words(self) -> int:
        """How many words of a command line its value takes; a switch has none."""
        kinds = (self.annotation, *get_args(self.annotation))
        items = next((get_args(kind) for kind in kinds if get_origin(kind) is tuple), ())
        return 0 if bool in kinds else 1 if ... in items else max(1, len(items))


def flag(name: str) -> str:
    """Write an option's name as a flag: `--global-batch`, and with one letter `-k`."""
    return f"{'-' if len(name) == 1 else '--'}{name.replace('_', '-')}"


def check_at_least(options: object, **least: int) -> None:
    """Check options that are whole numbers, where they are set.

    Args:
        least: By the name of a field, the least that it may be.

    Raises:
        UsageError: One is below; the message names its flag.
    """
    for name, limit in least.items():
        value = getattr(options, name)
        if value is not None and value < limit:
            raise UsageError(f"{flag(name)} is {value}: it must be at least {limit}")


def with_dashes(tokens: Sequence[str]) -> list[str]:
    """Spell the options of a command line as `flag` does, whichever way they are typed.

    Args:
        tokens: The command line; what comes after `--` isn't Paceline's.
    """
    end = list(tokens).index("--") if "--" in tokens else len(tokens)
    own: list[str] = []
    for token in tokens[:end]:
        match = None if own and own[-1] in _FREE_TEXT else _TYPED.match(token)
        name = match[0] if match else ""
        own.append(name.replace("_", "-") + token[len(name) :])
    return [*own, *tokens[end:]]


@cache
def option_fields(component: type, group: str) -> tuple[OptionField, ...]:
    """List the options of one component in the order of its dataclass.

    Args:
        component: A frozen dataclass whose fields all have defaults and docstrings. What is known
            at run time alone comes after the docstring, from a field's metadata `help`;
            another `group` is from there, too.
        group: The heading for `--help`.

    Raises:
        TypeError: A field has no default or no docstring (a bug of ours, found by the first test).
    """
    hints = get_type_hints(component, include_extras=True)
    described = _field_docstrings(component)
    listed = []
    for field in fields(component):
        if field.default is MISSING or not described.get(field.name):
            raise TypeError(f"{component.__name__}.{field.name} needs a default and a docstring")
        text = " ".join([*described[field.name].split(), *field.metadata.get("help", "").split()])
        listed.append(
            OptionField(
                name=field.name,
                annotation=hints[field.name],
                default=field.default,
                help=text,
                group=field.metadata.get("group", group),
            )
        )
    return tuple(listed)


def _field_docstrings(component: type) -> dict[str, str]:
    """Read what stands under the fields of a class, by hand: that comes before any command.

    `docstring_parser` does it five times slower, since it has each class's source tokenized.
    """
    scope: _Scope = _syntax_tree(component.__module__)
    for name in component.__qualname__.replace(".<locals>", "").split("."):
        inside = (s for s in scope.body if isinstance(s, _NAMED_SCOPES) and s.name == name)
        scope = next(inside, scope)
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in pairwise(scope.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


_NAMED_SCOPES = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_Scope = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@lru_cache(maxsize=1)  # a module's classes are read one after the other
def _syntax_tree(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(sys.modules[module]))


def check_names(given: Iterable[str], known: Iterable[str], what: str) -> None:
    """Refuse names that aren't known, listing the known ones.

    Raises:
        UsageError: At least one name is unknown.
    """
    names = sorted(known)
    unknown = [name for name in given if name not in names]
    if unknown:
        raise UsageError(unknown_name(unknown[0], names, what))


def check_values(values: Mapping[str, object], own: Container[str]) -> None:
    """Refuse what no option can be: numbers without end or sense, text that no name can be.

    What an option's own range is, its dataclass checks. This is for all: within these limits no
    product of options overflows, and nothing that takes a number (a clock, C code) refuses it.

    Args:
        values: By the options' Python names.
        own: Names of Paceline's own options; the others are arguments of a recipe.

    Raises:
        UsageError: A value is beyond the limits; the message says which.
    """
    for name, value in values.items():
        for part in value if isinstance(value, tuple | list) else (value,):
            wrong = _what_is_wrong(part, is_own=name in own and name != "seed")
            if wrong:
                raise UsageError(f"{flag(name)} {wrong}")


def _what_is_wrong(value: object, *, is_own: bool) -> str | None:
    if isinstance(value, str | PurePath):
        if "\0" in str(value):
            return "holds a NUL character, which nothing can be named by"
        return "is empty: give a value, or leave it out" if is_own and value == "" else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, float) and not isfinite(value):
        return f"is {value}: give a finite number"
    # Recipes' arguments may be as large as numbers of their kind can be.
    most = LARGEST_NUMBER if isinstance(value, float) else LARGEST_COUNT
    if not is_own:
        most = float_info.max if isinstance(value, float) else 2**63 - 1
    if abs(value) > most:
        shown = f"{value:g}" if isinstance(value, float) else shortened(str(value))
        return f"is {shown}: it can be at most {most:{'g' if isinstance(most, float) else ','}}"
    return None


def fits(value: object, annotation: object) -> bool:
    """Tell whether a value is what an option's annotation says; whole numbers pass as floats."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return any(fits(value, part) for part in parts)
    if origin is Literal:
        return value in parts
    if origin is tuple:
        return _fits_tuple(value, parts)
    if origin is Mapping:
        return isinstance(value, Mapping)
    if annotation in (int, float):
        numbers = (int, float) if annotation is float else int
        return isinstance(value, numbers) and not isinstance(value, bool)
    return isinstance(value, annotation) if isinstance(annotation, type) else True


def _fits_tuple(value: object, parts: tuple[object, ...]) -> bool:
    if not isinstance(value, tuple):
        return False
    if len(parts) == 2 and parts[1] is Ellipsis:
        return all(fits(item, parts[0]) for item in value)
    return len(value) == len(parts) and all(map(fits, value, parts))


def pick(kind: type[Shape], values: Mapping[str, OptionValue]) -> Shape:
    """Make a dataclass of options from the values that it has a field for.

    Args:
        kind: The dataclass; fields that no value is given for have their defaults.
        values: By name, checked already; others are left alone.
    """
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]  # a dataclass
    return kind(**{name: value for name, value in values.items() if name in names})


def read_dataclass(kind: type[Shape], content: object, *, strict: bool = False) -> Shape:
    """Make a dataclass of JSON, with the dataclasses, tuples and mappings that it holds.

    Args:
        strict: Whether names that are unknown here are errors. Otherwise another version may have
            written it, and they don't count.

    Raises:
        ValueError: It is something else; the message names what is wrong.
    """
    if not isinstance(content, Mapping):
        raise ValueError(f"a {kind.__name__} should be an object, not {describe_json(content)}")
    hints, needed = _fields_of(kind)  # type: ignore[arg-type]  # mypy: classes are hashable
    for name in needed:
        if name not in content:
            raise ValueError(f"{name} is missing")
    for name in content if strict else ():
        if name not in hints:
            raise ValueError(f"{describe_json(name)} is unknown")
    return kind(
        **{
            name: _read_value(hints[name], value, name, strict)
            for name, value in content.items()
            if name in hints
        }
    )


@cache
def _fields_of(kind: type) -> tuple[dict[str, object], list[str]]:
    """Give the types of a dataclass's fields, and the names of those without a default, sorted."""
    hints = get_type_hints(kind)
    known = [field for field in fields(kind) if field.init]
    needed = (f for f in known if f.default is MISSING and f.default_factory is MISSING)
    return {field.name: hints[field.name] for field in known}, sorted(f.name for f in needed)


def _read_value(hint: object, content: object, name: str, strict: bool) -> object:
    origin, parts = get_origin(hint), get_args(hint)
    # Types that consist of others: each of their values is read by its own type.
    if origin in (Union, UnionType):
        return _read_first(hint, content, name, strict)
    if origin is tuple and isinstance(content, list):
        kinds = parts[:1] * len(content) if parts[-1] is Ellipsis else parts
        pairs = zip(kinds, content, strict=True)
        return tuple(_read_value(kind, item, name, strict) for kind, item in pairs)
    if origin is Mapping and isinstance(content, Mapping):
        items = content.items()
        return {str(k): _read_value(parts[1], value, name, strict) for k, value in items}
    if is_dataclass(hint) and isinstance(content, Mapping):
        return read_dataclass(cast(type[object], hint), content, strict=strict)
    # Plain values.
    if not fits(content, hint):
        raise _wrong_type(name, content, hint)
    return content


def _read_first(union: object, content: object, name: str, strict: bool) -> object:
    """Read a value as the first of several types that it fits."""
    problem = _wrong_type(name, content, union)
    for hint in get_args(union):
        try:
            return _read_value(hint, content, name, strict)
        except ValueError as error:
            # What is wrong inside of an object says more.
            problem = error if is_dataclass(hint) and isinstance(content, Mapping) else problem
    raise problem


def _wrong_type(name: str, content: object, hint: object) -> ValueError:
    return ValueError(f"{name} is {describe_json(content)}; it should be {describe_type(hint)}")


def describe_type(annotation: object) -> str:
    """Describe an option's type: the values of a closed set, or its name."""
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(map(str, get_args(annotation)))
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(map(describe_type, get_args(annotation)))
    if annotation is NoneType:
        return "None"
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def unknown_name(name: str, known: Iterable[str], what: str, all_in: str = "") -> str:
    """Say that a name is unknown, with the closest known ones, and where all of them are.

    Args:
        all_in: What lists them all, where they are too many to be listed here.
    """
    names = sorted(known)
    close = in_words([repr(match) for match in closest_names(name, names)], "or")
    hint = f" Did you mean {close}?" if close else ""
    every = all_in if all_in and len(names) > _MAX_LISTED else f"Known: {', '.join(names)}"
    return f"unknown {what} {name!r}.{hint} {every}" if names else f"unknown {what} {name!r}"


_MAX_LISTED = 20
_LIKE = 0.75
"""Alike from here on, from 0 to 1: a slip or two in a word, and not another word of its length."""


_ELSEWHERE: Mapping[str, str] = {
    name: option
    for option, names in {
        "workers": "gpus num-gpus n-gpus ngpus devices num-devices nproc nproc-per-node np "
        "num-processes",
        "device": "accelerator cpu gpu cuda use-cpu no-cuda",
        "precision": "amp use-amp fp16 bf16 half mixed-precision",
        "global-batch": "bs batch-size train-batch-size",
        "batch-per-worker": "per-device-batch-size per-device-train-batch-size",
        "max-batch-per-worker": "accum-iter accumulation-steps gradient-accumulation-steps "
        "accumulate-grad-batches",
        "epochs": "num-train-epochs n-epochs",
        "lr": "learning-rate base-lr",
        "weight-decay": "wd",
        "clip-norm": "clip-grad grad-clip gradient-clip-val max-grad-norm max-norm",
        "loader-workers": "dataloader-num-workers",
        "log-every": "log-interval logging-steps log-every-n-steps print-freq",
        "snapshot-every": "checkpoint-every checkpoint-interval ckpt-every save-every "
        "save-interval",
        "snapshot-every-steps": "checkpoint-steps save-steps",
        "tracker": "logger report-to wandb mlflow use-wandb",
        "tracker-project": "wandb-project",
        "run-dir": "out output log-dir logdir save-dir work-dir default-root-dir",
        "data-dir": "data data-path data-root dataset-dir",
        "sync-batchnorm": "sync-bn",
        "compile": "torch-compile",
    }.items()
    for name in names.split()
}
"""What torchrun, Lightning, Transformers and scripts of many call an option of ours."""


def closest_names(name: str, known: Iterable[str]) -> list[str]:
    """List the known names that a misspelt one may stand for: three at most, the likeliest first.

    These are alike in their letters, or one has the other as its last words (`max-epochs` for
    `epochs`), or goes on after it (`warmup` for `warmup-epochs`). Where other tools call an option
    so, that is the one.
    """
    known = list(known)
    if meant := [other for other in known if _bare(other) == _ELSEWHERE.get(_bare(name))]:
        return meant[:1]
    likeness = {other: _likeness(_bare(name), _bare(other)) for other in sorted(known)}
    likely = [other for other in likeness if likeness[other] >= _LIKE]
    return sorted(likely, key=likeness.__getitem__, reverse=True)[:3]


def _bare(name: str) -> str:
    return name.lstrip("-").replace("_", "-").lower()


def _likeness(given: str, known: str) -> float:
    alike = difflib.SequenceMatcher(None, given, known).ratio()
    is_part = known.startswith(f"{given}-") or known.endswith(f"-{given}")
    return max(alike, _LIKE) if is_part or given.endswith(f"-{known}") else alike
