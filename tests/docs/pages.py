"""Reads the pages: their code blocks, commands, links and headings."""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMING_FROM = ROOT / "docs" / "coming-from"
PAGES: Sequence[Path] = (
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
)

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_INLINE = re.compile(r"`([^`\n]+)`")
_FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]+)")
_SOURCE = re.compile(r"[\w./-]+/[\w-]+\.py")
_ROW = re.compile(r"^\| (.+) \|$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    language: str
    text: str


def blocks(page: Path, language: str) -> list[Block]:
    """List a page's blocks in one language."""
    found = _BLOCK.findall(page.read_text())
    return [Block(page, kind, text) for kind, text in found if kind == language]


def commands(page: Path) -> Iterator[list[str]]:
    """List the commands of a page's console blocks, as words."""
    for block in blocks(page, "console"):
        for line in block.text.splitlines():
            if line.startswith("$ "):
                yield shlex.split(line[2:], comments=True)


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """List the links to other files and to headings: file and heading, empty for none."""
    for target in _LINK.findall(_prose(page)):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            yield (page.parent / path if path else page), anchor


def anchors(page: Path) -> set[str]:
    """Name a page's headings as links do."""
    titles = _HEADING.findall(_prose(page))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def rows(page: Path, heading: str) -> list[list[str]]:
    """List the rows of the tables under a heading, as cells; without the line under each head."""
    _, _, text = _prose(page).partition(f"\n## {heading}\n")
    text = text.partition("\n## ")[0]
    found = [[cell.strip() for cell in row.split("|")] for row in _ROW.findall(text)]
    return [cells for cells in found if not set("".join(cells)) <= {"-"}]


def inline_code(text: str) -> list[str]:
    """List what stands in backticks."""
    return _INLINE.findall(text)


def source_files(page: Path) -> set[str]:
    """Name the Python files that a page speaks of, as it writes them: `data/order.py`."""
    return {code for code in inline_code(_prose(page)) if _SOURCE.fullmatch(code)}


def flags(page: Path) -> set[str]:
    """List the flags that a page names, in code of either kind.

    Not what begins a table's row where a page tells of another tool: that is the tool's own.
    """
    prose = _prose(page)
    if page.parent == COMING_FROM:
        prose = re.sub(r"^\| [^|]+ \|", "", prose, flags=re.MULTILINE)
    code = " ".join(_INLINE.findall(prose))
    code += " ".join(block.text for block in blocks(page, "console"))
    return set(_FLAG.findall(code))


def _prose(page: Path) -> str:
    return _BLOCK.sub("", page.read_text())
