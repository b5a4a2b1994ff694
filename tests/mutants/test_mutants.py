"""The list of mutants has not rotted, and what is made of a trial is right."""

from collections import Counter
from dataclasses import replace

import pytest

from tests.mutants.__main__ import describe, touched_by
from tests.mutants.listing import SOURCE, Mutant, find_fault, read_list
from tests.mutants.running import PRELOAD, Result

MUTANT = Mutant(
    file="distributed/cpu_threads.py",
    old="return max(1, cores // sharing)",
    new="return cores",
    harm="too many threads",
    tests=("distributed/test_cpu_threads.py",),
)


def test_every_mutant_can_be_tried_on_todays_source() -> None:
    assert [fault for mutant in read_list() if (fault := find_fault(mutant))] == []


def test_the_list_covers_all_packages_and_has_each_once() -> None:
    mutants = read_list()
    assert len(mutants) >= 200
    packages = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    # Models and recipes are judged by what they learn; a script's session is the trainer's.
    assert packages - {mutant.package for mutant in mutants} <= {"models", "recipes", "script"}
    counts = Counter((mutant.file, mutant.old, mutant.new) for mutant in mutants)
    assert [key for key, count in counts.items() if count > 1] == []
    assert sum(bool(mutant.lives) for mutant in mutants) <= 0.05 * len(mutants)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None),
        ({"file": "data/none.py"}, "No such file"),
        ({"old": "no such text"}, "stands there 0 times"),
        ({"old": "cores"}, "times, not once"),
        ({"new": "return max(1,"}, "is no Python"),
        ({"new": "return  max(1, cores // sharing)"}, "changes nothing"),
        ({"tests": ("data/test_none.py",)}, "there is no tests/data/test_none.py"),
        ({"tests": ("distributed/test_cpu_threads.py::test_none",)}, "there is no test_none in"),
        ({"tests": ()}, "names no test"),
    ],
)
def test_what_cant_be_tried_is_said(change: dict[str, object], said: str | None) -> None:
    found = find_fault(replace(MUTANT, **change))  # type: ignore[arg-type]
    assert (found is None) == (said is None)
    assert (said or "") in (found or "")


def test_a_change_touches_the_mutants_of_its_files_and_tests() -> None:
    other = replace(
        MUTANT, file="distributed/group.py", tests=("distributed/test_group.py::test_x",)
    )
    assert touched_by({"src/paceline/distributed/cpu_threads.py"}, [MUTANT, other]) == [MUTANT]
    assert touched_by({"tests/distributed/test_group.py"}, [MUTANT, other]) == [other]
    assert touched_by({"README.md"}, [MUTANT, other]) == []


def test_results_are_told_by_package_with_what_needs_a_look() -> None:
    caught = Result(
        mutant=MUTANT, verdict="caught", time_s=1.0, by="distributed/test_cpu_threads.py::test_x"
    )
    explained = replace(MUTANT, file="data/order.py", lives="it is the same")
    results = [
        caught,
        replace(caught, verdict="timed out", by=""),
        replace(caught, mutant=explained, verdict="lived", by=""),
        replace(caught, mutant=explained),
    ]
    table, *remarks = describe(results).split("all  ")
    assert [line.split() for line in table.splitlines()[1:3]] == [
        ["data", "2", "1", "1", "0"],
        ["distributed", "2", "2", "0", "0"],
    ]
    rest = remarks[0]
    assert "timed out" in rest
    assert "known: it is the same" in rest
    assert "is caught now, take its `lives` away" in rest
    assert "distributed/test_cpu_threads.py::test_x" not in rest.split("is caught now")[0]


def test_nothing_of_paceline_is_imported_before_the_fork() -> None:
    """What a mutated copy is to be imported from may not be there already."""
    assert not [name for name in PRELOAD if name.split(".")[0] in ("paceline", "tests")]
