"""Every test here runs programs where there are pretend devices."""

from collections.abc import Iterator

import pytest

from tests.pretend_gpu.build import build
from tests.pretend_gpu.host import Host
from tests.support.needs import PRETEND_GPU, need


@pytest.fixture(scope="session")
def gpus() -> Iterator[Host]:
    """A machine with pretend devices."""
    need(PRETEND_GPU)
    with Host(build()) as host:
        yield host
