"""Try the mutants of `list/`: do the tests notice?

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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from tests.mutants.listing import REPOSITORY, Mutant, find_fault, read_list
from tests.mutants.running import Result, Terms, preload, run_all

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
        terms = Terms(jobs=given.jobs, limit_s=given.limit_s, core=given.core)
        if not given.no_baseline and not tests_pass(mutants, Path(scratch) / "baseline", terms):
            return 2
        tasks = [(mutant, mutant.tests) for mutant in mutants]
        results = []
        for result in run_all(tasks, Path(scratch) / "copies", terms):
            results.append(result)
            print(_line(result), flush=True)
    print(describe(results))
    if given.json:
        given.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    return _exit_code(results)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    add = parser.add_argument
    touched = "only mutants whose file or test differs from this commit (default: the last but one)"
    add("--touched", nargs="?", const="HEAD~1", metavar="BASE", help=touched)
    only = "only those with this regular expression in file, old text or harm"
    add("--only", default="", metavar="PATTERN", help=only)
    add("--core", action="store_true", help="let only tests count that `make test` runs")
    add("--jobs", type=int, default=2, metavar="N", help="how many at once")
    add("--limit-s", type=float, default=120.0, metavar="S", help="what takes longer is ended")
    add("--json", type=Path, metavar="FILE", help="write all results there")
    add("--no-baseline", action="store_true", help="don't run the tests without a mutant first")
    return parser


def changed_files(base: str) -> set[str]:
    """List what differs from a commit, with what isn't committed yet."""
    asked = ["git", "diff", "--name-only", base]
    said = subprocess.run(asked, cwd=REPOSITORY, check=False, capture_output=True, text=True)
    if said.returncode:
        sys.exit(f"--touched {base}: git can't compare with that: {said.stderr.strip()}")
    return set(said.stdout.split())


def touched_by(changed: set[str], mutants: Sequence[Mutant]) -> list[Mutant]:
    """Choose the mutants of which the file or a test has changed."""
    return [
        mutant
        for mutant in mutants
        if f"src/paceline/{mutant.file}" in changed
        or any(f"tests/{test.split('::')[0]}" in changed for test in mutant.tests)
    ]


def tests_pass(mutants: Sequence[Mutant], scratch: Path, terms: Terms) -> bool:
    """Run all tests that are named without a mutant: one that fails anyway proves nothing."""
    named = dict.fromkeys(test for mutant in mutants for test in mutant.tests)
    tests = [test for test in named if "::" not in test or test.split("::")[0] not in named]
    parts = [tests[place :: 4 * terms.jobs] for place in range(4 * terms.jobs)]
    tasks = [(None, part) for part in parts if part]
    limit_s = terms.limit_s * max(map(len, parts))
    found = list(run_all(tasks, scratch, replace(terms, limit_s=limit_s)))
    failed = [result.by for result in found if result.verdict not in ("lived", "skipped")]
    if failed:
        print("These fail, or take too long, without a mutant:", *failed, sep="\n  ")
        return False
    print(f"Without a mutant all {len(tests)} tests or files of tests pass.", flush=True)
    return True


def _line(result: Result) -> str:
    mutant = result.mutant
    assert mutant is not None
    by = f"  [{result.by}]" if result.by else ""
    change = f"{mutant.old!r} -> {mutant.new!r}" if result.verdict not in _GOOD else mutant.harm
    return f"{result.verdict:9} {result.time_s:5.1f} s  {mutant.file}: {change}{by}"


def describe(results: Sequence[Result]) -> str:
    """Tabulate what came of the mutants by package, and list what needs a look."""
    by_package: dict[str, Counter[str]] = {}
    for result in results:
        assert result.mutant is not None
        for name in (result.mutant.package, "all"):
            by_package.setdefault(name, Counter())[result.verdict] += 1
    lines = [f"{'package':12} {'mutants':>7} {'caught':>7} {'lived':>7} {'other':>7}"]
    for name, of in sorted(by_package.items(), key=lambda item: (item[0] == "all", item[0])):
        caught = sum(of[verdict] for verdict in _GOOD)
        rest = of.total() - caught - of["lived"]
        lines.append(f"{name:12} {of.total():7} {caught:7} {of['lived']:7} {rest:7}")
    return "\n".join([*lines, *_remarks(results)])


def _remarks(results: Sequence[Result]) -> Iterator[str]:
    for result in results:
        known = result.mutant.lives if result.mutant is not None else ""
        if result.verdict == "caught" and known:
            yield f"is caught now, take its `lives` away: {_line(result)}"
        elif result.verdict != "caught":
            yield _line(result) + (f"\n          known: {known}" if known else "")


def _exit_code(results: Sequence[Result]) -> int:
    if any(result.verdict == "broken" for result in results):
        return 2
    lived = [r.mutant for r in results if r.verdict == "lived"]
    return int(any(mutant is not None and not mutant.lives for mutant in lived))


if __name__ == "__main__":
    sys.exit(main())
