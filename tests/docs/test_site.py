"""The documentation builds as a site that needs no network."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.build_site import public_names

_LOADED = re.compile(r'<(?:script|img|iframe)[^>]* src="https?://|<link [^>]*href="https?://')


@pytest.mark.slow
def test_every_public_name_is_documented_and_nothing_is_loaded(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "docs" / "build_site.py"
    subprocess.run([sys.executable, script, tmp_path / "site"], check=True)
    api = (tmp_path / "site" / "docs" / "reference" / "api.html").read_text()
    described = set(re.findall(r'<h2 id="([\w.]+)"', api))
    assert described == set(public_names())
    assert "paceline.training.session.Session.evaluate" in api
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 30
    assert not [page for page in pages if _LOADED.search(page.read_text())]
    assert "tutorial/first-training.html" in (tmp_path / "site" / "index.html").read_text()
