"""The sink that the page shows is the one that the tests run."""

from pathlib import Path

from paceline.tracking.base import Sink
from paceline.tracking.registry import GROUP
from tests.docs.pages import ROOT, blocks, inline_code
from tests.docs.test_add_a_launcher import added
from tests.tracking.test_sinks import PLUGIN

PAGE = ROOT / "docs" / "internals" / "add-a-sink.md"


def test_the_diff_is_the_package_that_the_table_test_runs() -> None:
    files = [path for path in PLUGIN.iterdir() if path.is_file()]
    assert dict(added(block.text) for block in blocks(PAGE, "diff")) == {
        path.name: path.read_text() for path in files
    }


def test_the_page_names_every_method_and_file() -> None:
    named = inline_code(PAGE.read_text())
    for method in Sink.__abstractmethods__:
        assert any(text.startswith(f"Sink.{method}(") for text in named), method
    assert GROUP in named
    paths = [text for text in named if text.startswith(("src/", "tests/"))]
    assert len(paths) > 4
    assert [path for path in paths if not (ROOT / Path(path)).exists()] == []
