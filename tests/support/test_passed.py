"""A run of pytest that leaves out what another one has passed."""

from pathlib import Path

import pytest

from tests.support.passed import leave_out_passed, note_passed


def report(name: str, when: str, outcome: str) -> pytest.TestReport:
    return pytest.TestReport(name, ("", 0, ""), {}, outcome, None, when)  # type: ignore[arg-type]


def test_what_has_passed_is_left_out_the_next_time(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, own = tmp_path / "passed", request.node
    note_passed(report("tests/test_a.py::test_x", "call", "passed"))  # nobody wants to know
    monkeypatch.setenv("PACELINE_TEST_PASSED", str(path))
    note_passed(report("tests/test_a.py::test_x", "call", "skipped"))
    note_passed(report("tests/test_a.py::test_x", "setup", "passed"))
    assert not path.exists()
    items = [own]
    note_passed(
        report("tests/test_a.py::test_x[\N{LATIN SMALL LETTER U WITH DIAERESIS}]", "call", "passed")
    )
    monkeypatch.setenv("PACELINE_TEST_PASSED_BEFORE", str(path))
    leave_out_passed(request.config, items)
    assert items == [own]
    note_passed(report(own.nodeid, "call", "passed"))
    leave_out_passed(request.config, items)
    assert items == []


@pytest.mark.xdist_group("together")
def test_a_group_of_xdist_is_known_and_no_part_of_a_name(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With some versions of pytest xdist parts groups, and says nothing."""
    if request.config.getoption("loadgroup", default=False):
        assert request.node.nodeid.endswith("@together")
    path = tmp_path / "passed"
    monkeypatch.setenv("PACELINE_TEST_PASSED", str(path))
    for name in ("test_x@together", "test_x[u@b]@of-two", "test_x[u@b]"):
        note_passed(report(f"tests/test_a.py::{name}", "call", "passed"))
    names = ["test_x", "test_x[u@b]", "test_x[u@b]"]
    assert path.read_text().splitlines() == [f"tests/test_a.py::{name}" for name in names]
