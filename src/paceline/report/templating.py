"""Fills the pages' templates."""

import base64
import hashlib
from dataclasses import dataclass
from importlib.resources import files

from markupsafe import Markup

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
    return environment.get_template(name).render(values)


def _without_controls(value: object) -> object:
    """Write control characters of foreign text as escapes; what is markup already is ours."""
    return printable(value) if type(value) is str else value
