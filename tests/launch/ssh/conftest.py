import os
from pathlib import Path

import pytest

from tests.support.nearssh import near_ssh


@pytest.fixture
def near(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every host be this machine."""
    program = near_ssh(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{program}{os.pathsep}{os.environ['PATH']}")
