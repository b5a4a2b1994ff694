"""Try the mutants of `list/`: do the tests notice?

    python -m tests.mutants [--touched [BASE]] [--only PATTERN] [--jobs N] [--json FILE]

The source is copied; the working tree stays as it is. Ends with 1 where a mutant lives that isn't
explained in the list, and with 2 where one can't be tried.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.mutants.listing import REPOSITORY, Mutant, find_fault, read_list
from tests.mutants.running import Result, preload, run_all

_GOOD = ("caught", "timed out")


def main(words: Sequence[str] | None = None) -> int:
    """Try what is asked for and say what came of it."""
    given = _parser().parse_args(words)
    mutants = [m for m in read_list() if re.search(given.only, f"{m.file} {m.old} {m.harm}")]
    if given.touched is not None:
        mutants = touched_by(changed_files(given.touched), mutants)
    faults = [fault for mutant in mutants if (fault := find_fault(mutant))]
    if faults:
        print("These can't be tried on today's source; mend the list:", *faults, sep="\n  ")
        return 2
    if not mutants:
        print("No mutant to try.")
        return 0
    preload()
    with tempfile.TemporaryDirectory(prefix="paceline-mutants-") as scratch:
        if not given.no_baseline and not tests_pass(mutants, Path(scratch), given.limit_s):
            return 2
        tasks = [(mutant, mutant.tests) for mutant in mutants]
        results = []
        for result in run_all(tasks, Path(scratch) / "copies", given.jobs, given.limit_s):
            results.append(result)
            print(_line(result), flush=True)
    print(describe(results))
    if given.json:
        given.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    return _exit_code(results)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--touched", nargs="?", const="HEAD~1", metavar="BASE")
    parser.add_argument("--only", default="", metavar="PATTERN")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=120.0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument(
        "--no-baseline", action="store_true", help="don't run the tests as they are"
    )
    return parser


def changed_files(base: str) -> set[str]:
    """List what differs from a commit, with what isn't committed yet."""
    asked = ["git", "diff", "--name-only", base]
    said = subprocess.run(asked, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    return set(said.stdout.split())


def touched_by(changed: set[str], mutants: Sequence[Mutant]) -> list[Mutant]:
    """Choose the mutants of which the file or a test has changed."""
    return [
        mutant
        for mutant in mutants
        if f"src/paceline/{mutant.file}" in changed
        or any(f"tests/{test.split('::')[0]}" in changed for test in mutant.tests)
    ]


def tests_pass(mutants: Sequence[Mutant], scratch: Path, limit_s: float) -> bool:
    """Run all tests that are named without a mutant: one that fails anyway proves nothing."""
    named = dict.fromkeys(test for mutant in mutants for test in mutant.tests)
    tests = [test for test in named if "::" not in test or test.split("::")[0] not in named]
    (found,) = run_all([(None, tests)], scratch / "baseline", 1, limit_s * max(1, len(tests)))
    if found.verdict in ("lived", "skipped"):
        print(f"Without a mutant {len(tests)} files or tests pass, in {found.time_s:.0f} s.")
        return True
    print(f"The tests fail without a mutant: {found.by}")
    return False


def _line(result: Result) -> str:
    mutant = result.mutant
    assert mutant is not None
    by = f"  [{result.by}]" if result.by else ""
    change = f"{mutant.old!r} -> {mutant.new!r}" if result.verdict not in _GOOD else mutant.harm
    return f"{result.verdict:9} {result.time_s:5.1f} s  {mutant.file}: {change}{by}"


def describe(results: Sequence[Result]) -> str:
    """Tabulate what came of the mutants by package, and list what needs a look."""
    counts = Counter((_package(result), result.verdict) for result in results)
    packages = sorted({package for package, _ in counts})
    lines = [f"{'package':12} {'mutants':>7} {'caught':>7} {'lived':>7} {'other':>7}"]
    for package in [*packages, "all"]:
        of = {v: n for (p, v), n in counts.items() if package in (p, "all") for v in [v]}
        if package == "all":
            of = dict(Counter(result.verdict for result in results))
        total, caught = sum(of.values()), sum(of.get(verdict, 0) for verdict in _GOOD)
        lived = of.get("lived", 0)
        lines.append(f"{package:12} {total:7} {caught:7} {lived:7} {total - caught - lived:7}")
    for result in results:
        if result.verdict != "caught":
            lines.append(_line(result))
            if result.mutant is not None and result.mutant.lives:
                lines.append(f"          known: {result.mutant.lives}")
        elif result.mutant is not None and result.mutant.lives:
            lines.append(f"is caught now, take its `lives` away: {_line(result)}")
    return "\n".join(lines)


def _package(result: Result) -> str:
    assert result.mutant is not None
    return result.mutant.package


def _exit_code(results: Sequence[Result]) -> int:
    if any(result.verdict == "broken" for result in results):
        return 2
    lived = [r.mutant for r in results if r.verdict == "lived"]
    return int(any(mutant is not None and not mutant.lives for mutant in lived))


if __name__ == "__main__":
    sys.exit(main())
