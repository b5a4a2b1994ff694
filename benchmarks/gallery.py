"""The gallery of `paceline verify`: public faults, each found and mended, and healthy scripts.

    python -m benchmarks.gallery [NAME ..] [--workers 1,2,3] [--write] [--check]

The scripts are those of tests/verify/gallery. A fault counts as found where verify names its cause
and a line that is marked: with `# fault`, or with `# shows` where that is only the effect's. Its
mended form and healthy scripts must be the same on all numbers of workers. `--write` puts the
rows into docs/reference/verify-gallery.md, `--check` exits with 1 where one differs from what
stands there. Scripts whose packages aren't installed are left out, and named.
"""

import argparse
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from paceline.cli.app import main as paceline
from paceline.launch.local import forkserver
from paceline.verify.launches import PRELOAD

ROOT = Path(__file__).resolve().parent.parent
GALLERY = ROOT / "tests" / "verify" / "gallery"
PAGE = ROOT / "docs" / "reference" / "verify-gallery.md"
FAULT_HEAD = "| fault | report | verdict | cause | line |"
HEALTHY_HEAD = "| healthy script | workers | verdict |"
FAULTS_ON, HEALTHY_ON = "1,2", "1,2,3"
_OPTIONS = ("--threads", "1", "--timeout-s", "5")
_LINK = re.compile(r"https://github\.com/([\w.-]+/[\w.-]+)/(?:issues|pull)/(\d+)")


@dataclass(frozen=True)
class Script:
    """A script of the gallery."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def text(self) -> str:
        return self.path.read_text()

    @property
    def about(self) -> str:
        """The first sentence of its docstring."""
        return self.text.partition('"""')[2].splitlines()[0].rstrip('."')

    @property
    def report(self) -> str:
        """A link to the public report of the fault, as Markdown."""
        found = _LINK.search(self.text)
        assert found, f"{self.path} links to no report"
        return f"[{found[1]}#{found[2]}]({found[0]})"

    @property
    def cause(self) -> str:
        """The cause that verify has to name; `not seen` where it can't."""
        found = re.search(r"^Cause: (.+)$", self.text, re.MULTILINE)
        assert found, f"{self.path} names no cause"
        return found[1]

    @property
    def arguments(self) -> list[str]:
        """Of the script, in its docstring."""
        return self._words("Arguments")

    @property
    def options(self) -> list[str]:
        """Of verify, in its docstring."""
        return self._words("Options")

    @property
    def resumes(self) -> bool:
        """Whether it is killed and started again, on one number of workers."""
        return "--resume" in self.options

    @property
    def lacks(self) -> list[str]:
        """The packages that it needs, which Paceline doesn't, and that aren't installed."""
        return [name for name in self._words("Needs") if find_spec(name) is None]

    def _words(self, label: str) -> list[str]:
        found = re.search(rf"^{label}: (.+)$", self.text, re.MULTILINE)
        return found[1].split() if found else []

    @property
    def marked(self) -> dict[int, str]:
        """The lines that are at fault, and those in which only the effect shows."""
        lines = enumerate(self.text.splitlines(), 1)
        marks = ((n, re.search(r"# (fault|shows)$", line)) for n, line in lines)
        return {n: mark[1] for n, mark in marks if mark}


def faults() -> list[Script]:
    """List the scripts with a fault."""
    return [Script(p) for p in sorted((GALLERY / "faults").glob("*.py")) if p.stem != "common"]


def healthy() -> list[Script]:
    """List the scripts without one."""
    return [Script(path) for path in sorted((GALLERY / "healthy").glob("*.py"))]


@dataclass(frozen=True)
class Verified:
    """What came out of a verification."""

    code: int
    verdicts: tuple[str, ...]
    """On all but the first number of workers, or of resuming."""
    findings: tuple[dict[str, object], ...]
    out: str

    @property
    def verdict(self) -> str:
        """The verdicts; where they agree, one."""
        return ", ".join(dict.fromkeys(self.verdicts))

    def lines(self, cause: str) -> list[int]:
        """The lines that are named for a cause."""
        found = [f["lines"] for f in self.findings if f["cause"] == cause]
        return [place["line"] for lines in found if isinstance(lines, list) for place in lines]


def verify(script: Script, *arguments: str, workers: str) -> Verified:
    """Run `paceline verify` on a script, in a directory of its own."""
    before, told = Path.cwd(), io.StringIO()
    with tempfile.TemporaryDirectory(prefix="paceline-gallery-") as place:
        os.chdir(place)
        counts = workers.rpartition(",")[2] if script.resumes else workers
        words = ["verify", str(script.path), "--workers", counts, *_OPTIONS, "--json", "found"]
        words += script.options
        given = [*script.arguments, *arguments]
        try:
            with redirect_stdout(told), redirect_stderr(told):
                code = paceline([*words, *(["--", *given] if given else [])])
            found = json.loads(Path("found").read_text()) if Path("found").exists() else {}
        finally:
            os.chdir(before)
    rows = [] if script.resumes else found.get("compared", [])[1:]
    headline = str(found.get("verdict", "")).partition(":")[0]
    resumed = ["same" if code == 0 else headline] if script.resumes else []
    return Verified(
        code,
        (*(row["verdict"] for row in rows), *resumed),
        tuple(found.get("findings", ())),
        told.getvalue(),
    )


def fault_row(script: Script, workers: str) -> tuple[str, bool, str]:
    """Verify a fault and its mended form.

    Returns:
        The row of the table, whether the fault was found and its mended form accepted, and what
        was printed where it wasn't.
    """
    faulty = verify(script, workers=workers)
    mended = verify(script, "--mended", workers=workers)
    causes = [str(finding["cause"]) for finding in faulty.findings]
    named = [n for n in faulty.lines(script.cause) if n in script.marked]
    named.sort(key=lambda n: script.marked[n])  # at fault before where it shows
    is_found = script.cause in causes and bool(named)
    is_mended = mended.code == 0 and script.cause not in {f["cause"] for f in mended.findings}
    cause = script.cause if script.cause in causes else ", ".join(causes) or "none"
    line = f"{script.name}.py:{named[0]}" if named else "not named"
    if named and script.marked[named[0]] == "shows":
        line += " (where it shows)"
    row = f"| {script.about} | {script.report} | {faulty.verdict} | `{cause}` | {line} |"
    if not is_mended:
        row += f" mended: {mended.verdict or mended.code}"
    told = "" if is_found and is_mended else faulty.out if not is_found else mended.out
    return row, is_found and is_mended, told


def healthy_row(script: Script, workers: str) -> tuple[str, bool, str]:
    """Verify a healthy script. Returns as `fault_row` does."""
    found = verify(script, workers=workers)
    causes = [str(f["cause"]) for f in found.findings if f["is_fault"]]
    is_good = found.code == 0 and not causes
    shown = found.verdict + (f": {', '.join(causes)}" if causes else "")
    return (
        f"| {script.about} | {_on(script, workers)} | {shown} |",
        is_good,
        "" if is_good else found.out,
    )


def _on(script: Script, workers: str) -> str:
    counts = workers.split(",")
    return f"{counts[-1]}, resumed" if script.resumes else ", ".join(counts)


def written(path: Path = PAGE) -> list[str]:
    """Give the rows that stand in the page."""
    return [line for line in path.read_text().splitlines() if line.startswith("| ")]


def _run(scripts: Sequence[Script], workers: str | None) -> Iterator[tuple[Script, str, bool]]:
    forkserver.prepare(PRELOAD, 1)
    try:
        for script in scripts:
            if script.path.parent.name == "faults":
                row, is_good, told = fault_row(script, workers or FAULTS_ON)
            else:
                row, is_good, told = healthy_row(script, workers or HEALTHY_ON)
            print(row, flush=True)
            if told:
                print(told, file=sys.stderr, flush=True)
            yield script, row, is_good
    finally:
        forkserver.release()


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="scripts; all without")
    parser.add_argument("--workers", help=f"default: {FAULTS_ON} and, healthy ones, {HEALTHY_ON}")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args()
    chosen = [
        script
        for script in (*faults(), *healthy())
        if not asked.names or script.name in asked.names
    ]
    left_out = [s for s in chosen if s.lacks]
    for script in left_out:
        print(f"left out: {script.name} needs {' and '.join(script.lacks)}", file=sys.stderr)
    results = list(_run([s for s in chosen if not s.lacks], asked.workers))
    for kind, verb in (("faults", "found, and mended"), ("healthy", "not accused")):
        good = [is_good for script, _, is_good in results if script.path.parent.name == kind]
        print(f"{kind}: {sum(good)} of {len(good)} {verb}", flush=True)
    rows = [row for _, row, _ in results]
    if asked.write:
        _write(results)
    if not asked.check:
        return 0
    differing = [row for row in rows if row not in written()]
    print(*(f"differs from {PAGE.name}: {row}" for row in differing), sep="\n", file=sys.stderr)
    return 1 if differing else 0


def _write(results: Sequence[tuple[Script, str, bool]]) -> None:
    """Put the rows in the page's tables, whose other rows stay."""
    text = PAGE.read_text()
    known = {row.split(" | ")[0]: row for row in written()}
    known |= {row.split(" | ")[0]: row for _, row, _ in results}
    for head, scripts in ((FAULT_HEAD, faults()), (HEALTHY_HEAD, healthy())):
        before, _, rest = text.partition(head)
        after = re.sub(r"\A\n(\|.*\n)*", "", rest)
        abouts = [f"| {script.about}" for script in scripts]
        rows = [known[about] for about in abouts if about in known]
        table = [head, "|" + "---|" * (head.count("|") - 1), *rows]
        text = before + "\n".join(table) + "\n" + after
    PAGE.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
