"""What is said before anything slow."""

import io
import sys

import pytest

from paceline.runtime.spec import Place
from paceline.runtime.start import say_starting


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "progress", "told"),
    [
        (Terminal(), "auto", "Starting 2 workers\n"),
        (Terminal(), "off", ""),
        (io.StringIO(), "auto", ""),
        (None, "auto", None),
    ],
)
def test_a_person_at_a_terminal_is_told_what_starts(
    stream: io.StringIO | None, progress: str, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    say_starting(Place(here=False, workers=2), progress)
    assert (stream.getvalue() if stream is not None else None) == told
