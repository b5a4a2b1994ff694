"""Builds the documentation as a site, with an API reference of the docstrings: `make docs`.

$ python docs/build_site.py [FOLDER]

Loads nothing from a network, neither here nor in the browser. A link that leads nowhere is an
error.
"""

import inspect
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from mkdocs.commands.build import build
from mkdocs.config import load_config

import paceline
from paceline import errors
from paceline.gradient_sync.registry import SyncEntry
from paceline.launch.base import Launcher, Rendered
from paceline.launch.registry import LauncherEntry
from paceline.tracking.base import Sink
from paceline.tracking.registry import SinkEntry
from paceline.training.hooks.base import StepHook
from paceline.training.sync.base import GradientSync

ROOT = Path(__file__).parents[1]
API = "docs/reference/api.md"
EXTENDED: Sequence[type] = (
    GradientSync,
    SyncEntry,
    Launcher,
    Rendered,
    LauncherEntry,
    Sink,
    SinkEntry,
    StepHook,
)
"""What other packages may add to Paceline by."""

_COPIED = ("README.md", "CHANGELOG.md", "LICENSE", "docs", "examples", "benchmarks")
_LINKED = re.compile(r"\]\(([\w./-]+\.md)\)")


def build_site(folder: Path) -> None:
    """Build the site.

    Args:
        folder: It is made, or emptied first.

    Raises:
        SystemExit: A page has a link that leads nowhere, or a docstring can't be read.
    """
    with TemporaryDirectory(prefix="paceline-docs-") as scratch:
        # The pages link to each other as files of the repository: keep that layout.
        pages = Path(scratch) / "pages"
        for name in _COPIED:
            _copy(ROOT / name, pages / name)
        (pages / API).write_text("\n".join(_api_lines()))
        _with_api(pages / "docs" / "index.md")
        config = load_config(
            str(Path(__file__).with_name("mkdocs.yml")),
            docs_dir=str(pages),
            site_dir=str(folder.absolute()),
            strict=True,
            nav=list(_navigation(pages / "docs" / "index.md")),
        )
        build(config)


def public_names() -> Iterator[str]:
    """Name everything of the API reference by its full path, in the order of the page."""
    for name in paceline.__all__:
        found = getattr(paceline, name)
        if hasattr(found, "__qualname__"):
            yield f"{found.__module__}.{found.__qualname__}"
    for _, kind in inspect.getmembers(errors, inspect.isclass):
        if issubclass(kind, paceline.PacelineError) and kind is not paceline.PacelineError:
            yield f"{kind.__module__}.{kind.__qualname__}"
    for kind in EXTENDED:
        yield f"{kind.__module__}.{kind.__qualname__}"


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)


def _api_lines() -> Iterator[str]:
    yield "# API\n"
    yield "What scripts and recipes call, the errors, and what packages may extend.\n"
    for name in public_names():
        yield f"::: {name}\n"


def _with_api(index: Path) -> None:
    """List the API beside the other pages of the reference, which a repository shows without it."""
    text = index.read_text()
    row = "| [options.md](reference/options.md)"
    assert row in text
    index.write_text(
        text.replace(row, f"| [API](reference/api.md) | every function and class |\n{row}")
    )


def _navigation(index: Path) -> Iterator[object]:
    """Give the sections of the index with their pages, in its order."""
    yield "README.md"
    heading, *sections = index.read_text().split("\n## ")
    assert heading
    yield {"Documentation": "docs/index.md"}
    for section in sections:
        pages = [f"docs/{path}" for path in _LINKED.findall(section) if not path.startswith("..")]
        if pages:
            title = section.partition("\n")[0].partition(":")[0]
            yield {title: [*dict.fromkeys(pages)]}
    yield {"Changes": "CHANGELOG.md"}


if __name__ == "__main__":
    build_site(Path(sys.argv[1] if len(sys.argv) > 1 else "build/site"))
