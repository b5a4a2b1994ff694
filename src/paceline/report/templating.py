"""Fills the pages' templates."""

from paceline.options.text import printable


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
