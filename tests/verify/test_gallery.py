"""The gallery of public faults: its page, and some of its rows."""

import re

import pytest

from benchmarks.gallery import (
    FAULTS_ON,
    HEALTHY_ON,
    PAGE,
    Script,
    fault_row,
    faults,
    healthy,
    healthy_row,
    written,
)

SOME_FAULTS = ("wrapper_bypassed", "tokens_weighed_alike")
SOME_HEALTHY = ("mp_spawn",)


def named(scripts: list[Script], names: tuple[str, ...]) -> list[Script]:
    return [script for script in scripts if script.name in names]


def test_every_script_is_in_the_page() -> None:
    rows = written()
    for script in faults():
        assert script.marked, f"{script.path} marks no line"
        assert any(
            row.startswith(f"| {script.about} | {script.report} |") and f"`{script.cause}`" in row
            for row in rows
        ), script.path
    for script in healthy():
        on = "3, resumed" if script.resumes else "1, 2, 3"
        assert any(
            row.startswith(f"| {script.about} | {on} | ") and "same" in row for row in rows
        ), script.path


def test_lines_of_the_page_are_marked_in_the_scripts() -> None:
    scripts = {script.name: script for script in faults()}
    places = re.findall(r"(\w+)\.py:(\d+)( \(where it shows\))?", PAGE.read_text())
    assert len(places) >= 20
    for name, line, shows in places:
        assert scripts[name].marked[int(line)] == ("shows" if shows else "fault"), name


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.xdist_group("verify")
@pytest.mark.parametrize("script", named(faults(), SOME_FAULTS), ids=lambda script: script.name)
def test_public_faults_are_found(script: Script, fork_server: None) -> None:
    row, is_good, told = fault_row(script, FAULTS_ON)
    assert is_good, told
    assert row in written()


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.xdist_group("verify")
@pytest.mark.parametrize("script", named(healthy(), SOME_HEALTHY), ids=lambda script: script.name)
def test_healthy_scripts_are_not_accused(script: Script, fork_server: None) -> None:
    row, is_good, told = healthy_row(script, HEALTHY_ON)
    assert is_good, told
    assert row in written()
