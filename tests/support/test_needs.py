"""What a machine lacks is found by trying, named with its packages, and a failure in CI."""

import pytest

from tests.support.needs import REQUIRE_ALL, Need, need

MISSING = Need(
    what="a tool", programs={"no-such-tool": "one two", "no-such-other": "one", "sh": "x"}
)


def test_what_is_missing_skips_a_test_and_fails_it_where_all_is_required(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(REQUIRE_ALL, raising=False)
    text = r"needs a tool: no no-such-tool, no-such-other \(Debian: one two\)"
    with pytest.raises(pytest.skip.Exception, match=text):
        need(Need(what="all", programs={"sh": "dash"}), MISSING)
    monkeypatch.setenv(REQUIRE_ALL, "1")
    with pytest.raises(pytest.fail.Exception, match=text):
        need(MISSING)
