"""Fills the pages' templates, and writes pages over older ones of their kind alone."""

import base64
import hashlib
import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from markupsafe import Markup, escape

from paceline.errors import UsageError
from paceline.files import open_plain, write_atomic, writing
from paceline.options.text import printable


@dataclass(frozen=True)
class InlineScript:
    """A script of ours as it stands in a page, and what lets the page run it alone."""

    text: Markup
    policy: str
    """A source of the Content-Security-Policy's `script-src`."""


def read_script(name: str) -> InlineScript:
    """Read one of the scripts beside the templates."""
    text = files("paceline.report").joinpath("templates", name).read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return InlineScript(Markup(text), f"sha256-{digest}")


def fill_template(name: str, /, **values: object) -> str:
    """Fill one of the templates; text is escaped, and a value that is missing is an error."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("paceline.report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_without_controls,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(options=_with_whole_options, unbroken=_unbroken)
    return environment.get_template(name).render(values)


REPORT = "Paceline report"
"""What pages of one run or study name as the generator."""


def write_report(path: Path, page: str, usual: Path) -> Path:
    """Write the page of a run or a study, and give its path.

    Args:
        path: Where to; it may hold an older such page.
        usual: Its place in the run's or study's own directory, where whatever is there is one.

    Raises:
        UsageError: There is something else.
        OSError: It can't be written; an older page stays.
    """
    if path != usual:
        refuse_other(path, REPORT, "`paceline report`")
    write_atomic(path, page.encode("utf-8", errors="replace"))
    return path


def refuse_other(path: Path, generator: str, of: str) -> None:
    """Refuse a place where something else than an older page of ours stands.

    Args:
        generator: What such pages name as the generator.
        of: The commands that write them, for the message.

    Raises:
        UsageError: There is something else.
    """
    if path.exists() and not _is_by(path, generator):
        raise UsageError(f"{path} is there, and is no page of {of}: move it away")


def write_page(path: Path, page: str, generator: str, of: str) -> Path:
    """Write a page over an older one of the same kind, and over nothing else.

    Raises:
        UsageError: There is something else, or it can't be written.
        StorageError: The disk is full.
    """
    with writing(path):
        refuse_other(path, generator, of)
        write_atomic(path, page.encode("utf-8", errors="replace"))
    return path


def _is_by(path: Path, generator: str) -> bool:
    try:
        with open_plain(path) as file:
            return f'content="{generator}"'.encode() in file.read(4096)
    except (OSError, ValueError):
        return False


_OPTION = re.compile(r"(?<![^\s(])-{1,2}[a-z][\w-]*")
_SHORT = 14


def _with_whole_options(text: object) -> Markup:
    """Mark the options in a text, such as `--batch-size`, so that no line ends within one."""
    whole, place = Markup(), 0
    shown = printable(str(text))
    for found in _OPTION.finditer(shown):
        whole += escape(shown[place : found.start()])
        whole += Markup('<span class="whole">{}</span>').format(found[0])
        place = found.end()
    return whole + escape(shown[place:])


def _unbroken(figure: str) -> Markup:
    """Keep a short figure, such as `3 min 56 s`, in one line."""
    kept = '<span class="whole">{}</span>' if len(figure) <= _SHORT else "{}"
    return Markup(kept).format(printable(figure))  # which escapes it


def _without_controls(value: object) -> object:
    """Write control characters of foreign text as escapes; what is markup already is ours."""
    return printable(value) if type(value) is str else value
