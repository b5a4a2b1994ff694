from urllib.error import URLError

import pytest


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(url: str) -> None:
        raise URLError("no route to host")

    monkeypatch.setattr("paceline.data.download.open_https", refuse)
