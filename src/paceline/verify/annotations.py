"""What was found, as GitHub Actions shows it at its line of the script (`--format github`)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

_SPECIAL = "%\r\n"
"""docs.github.com, "Workflow commands for GitHub Actions"; actions/toolkit, `command.ts`."""


def github_annotations(found: Mapping[str, object], directory: Path) -> str:
    """Write a line for each finding: an error, or a notice for a note.

    Args:
        found: What `--json` writes.
        directory: Somewhere in the repository, from whose root GitHub counts files.
    """
    above = (directory, *directory.parents)
    root = next((path for path in above if (path / ".git").exists()), directory)
    findings = cast(list[dict[str, Any]], found["findings"])
    lines = []
    for finding in findings:
        at = [line for line in finding["lines"] if Path(line["file"]).is_relative_to(root)][:1]
        files = [_escaped(Path(line["file"]).relative_to(root), f"{_SPECIAL}:,") for line in at]
        place = "".join(f"file={f},line={line['line']}," for f, line in zip(files, at, strict=True))
        text = _escaped(f"{finding['what']}\nwhy: {finding['why']}")
        kind = "error" if finding["is_fault"] else "notice"
        lines.append(f"::{kind} {place}title=paceline verify%3A {finding['cause']}::{text}")
    if not (found["is_good"] or any(finding["is_fault"] for finding in findings)):
        lines.append(f"::error title=paceline verify::{_escaped(found['verdict'])}")
    return "\n".join(lines)


def _escaped(text: object, special: str = _SPECIAL) -> str:
    return "".join(f"%{ord(c):02X}" if c in special else c for c in str(text))
