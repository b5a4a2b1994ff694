"""The account of a test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.provision.aws.account import Account, emptied, served


@pytest.fixture(scope="session")
def moto() -> Iterator[Account]:
    with served() as account:
        yield account


@pytest.fixture
def account(moto: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Account:
    """An empty account, to which boto3 is pointed; and a home with a key."""
    return emptied(moto, tmp_path, monkeypatch)
