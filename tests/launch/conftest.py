import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.launch.local import forkserver
from tests.launch.launching import Launch


@pytest.fixture(scope="module")
def fork_server() -> Iterator[None]:
    here = str(Path(__file__).parent)
    sys.path.insert(0, here)  # workers get it with the preparation data
    try:
        forkserver.prepare((), 1)
        yield
    finally:
        forkserver.release()
        sys.path.remove(here)


@pytest.fixture
def launch(tmp_path: Path, fork_server: None) -> Launch:
    return Launch(tmp_path / "logs", [])
