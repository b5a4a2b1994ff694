"""Tests on a rig of hosts: one rig at a time, each test with its own."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.hosts.overhosts import train_alone
from tests.hosts.rig import Rig
from tests.support.needs import HOSTS, need

MakeRig = Callable[..., Rig]


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[MakeRig]:
    """Give the means to build a rig: `make_rig(hosts=3)`; it is torn down with the test."""
    need(HOSTS)
    with ExitStack() as stack:

        def make(
            hosts: int = 3, environments: Mapping[int, Mapping[str, str]] | None = None
        ) -> Rig:
            directory = tmp_path / "rig"
            directory.mkdir()
            return stack.enter_context(Rig(directory, hosts, environments or {}))

        yield make


@pytest.fixture
def rig(make_rig: MakeRig) -> Rig:
    """A rig of three hosts."""
    return make_rig()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> object:
    """Hash of the weights that the recipe with gates ends with, whatever happens on the way."""
    need(HOSTS)
    return train_alone(tmp_path_factory.mktemp("alone") / "training")
