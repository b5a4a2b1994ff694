"""What a machine lacks is found by trying, named with its packages, and a failure in CI."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import needs
from tests.support.needs import REQUIRE_ALL, Need, need, why_not


def works(_: Path) -> None:
    """Like a need whose attempt finds nothing wrong."""


def fails(_: Path) -> str:
    return "unshare: Operation not permitted"


def raises(_: Path) -> str:
    raise RuntimeError("h0 said nothing\nits log")


MISSING = Need(
    what="a tool", programs={"no-such-tool": "one two", "no-such-other": "one", "sh": "x"}
)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (Need(what="all", programs={"sh": "dash"}, attempt=works), None),
        (Need(what="rights", programs={"sh": "dash"}, attempt=fails), fails(Path())),
        (Need(what="a rig", attempt=raises), "h0 said nothing: its log"),
        (MISSING, "no no-such-tool, no-such-other (Debian: one two)"),
        (Need(what="more", attempt=works, builds_on=[MISSING]), why_not(MISSING)),
    ],
)
def test_why_a_need_is_not_met(asked: Need, reason: str | None) -> None:
    assert why_not(asked) == reason


def test_what_is_missing_skips_a_test_and_fails_it_where_all_is_required(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(REQUIRE_ALL, raising=False)
    text = r"needs a tool: no no-such-tool, no-such-other \(Debian: one two\)"
    with pytest.raises(pytest.skip.Exception, match=text):
        need(Need(what="all", attempt=works), MISSING)
    monkeypatch.setenv(REQUIRE_ALL, "1")
    with pytest.raises(pytest.fail.Exception, match=text):
        need(MISSING)


def test_an_attempt_is_made_once() -> None:
    tried: list[Path] = []
    one = Need(what="something", attempt=lambda directory: tried.append(directory))
    need(one)
    need(one)
    assert len(tried) == 1
    assert not tried[0].exists()


def all_needs() -> list[Need]:
    return [value for value in vars(needs).values() if isinstance(value, Need)]


def test_without_its_programs_every_need_names_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert len(all_needs()) > 10
    for one in all_needs():
        reason: Callable[[Need], str | None] = why_not.__wrapped__
        assert "(Debian: " in str(reason(one)), one.what


def test_programs_that_refuse_to_work_are_not_taken_for_working(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in a container that has everything installed and forbids namespaces and mounts."""
    for name in {program for one in all_needs() for program in one.programs} | {"chromium"}:
        (tmp_path / name).write_text("#!/bin/sh\necho Operation not permitted >&2; exit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    why_not.cache_clear()
    try:
        for one in all_needs():
            assert why_not(one), one.what
        assert os.environ["PATH"] == str(tmp_path)
    finally:
        why_not.cache_clear()
