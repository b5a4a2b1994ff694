"""The launcher that the page shows is the one that the tests run."""

from pathlib import Path

from paceline.launch.base import Launcher, SubmittedJob
from paceline.launch.registry import GROUP
from tests.docs.pages import ROOT, blocks, inline_code
from tests.launch.test_launchers import PLUGIN

PAGE = ROOT / "docs" / "internals" / "add-a-launcher.md"


def added(diff: str) -> tuple[str, str]:
    """Apply a diff that adds a file: its name and its text."""
    before, after, span, *lines = diff.splitlines()
    assert before == "--- /dev/null"
    assert span == f"@@ -0,0 +1,{len(lines)} @@"
    assert all(line.startswith("+") for line in lines)
    return after.removeprefix("+++ b/"), "".join(f"{line[1:]}\n" for line in lines)


def test_the_diff_is_the_package_that_the_table_test_runs() -> None:
    files = [path for path in PLUGIN.iterdir() if path.is_file()]
    assert dict(added(block.text) for block in blocks(PAGE, "diff")) == {
        path.name: path.read_text() for path in files
    }


def test_the_page_names_every_method_and_file() -> None:
    named = inline_code(PAGE.read_text())
    for kind in (Launcher, SubmittedJob):
        for method in kind.__abstractmethods__ - {"poll_s"}:
            assert any(text.startswith(f"{kind.__name__}.{method}(") for text in named), method
    assert GROUP in named
    paths = [text for text in named if text.startswith(("src/", "tests/"))]
    assert len(paths) > 4
    assert [path for path in paths if not (ROOT / Path(path)).exists()] == []
