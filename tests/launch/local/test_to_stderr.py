"""How the launcher's lines reach a terminal on which a worker redraws its progress."""

import io
import sys

import pytest

from paceline.launch.local.launcher import to_stderr


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "told"),
    [(Terminal(), "\r\x1b[2Kstopping \\x1b[31m\n"), (io.StringIO(), "stopping \\x1b[31m\n")],
)
def test_a_line_takes_the_place_of_the_progress_on_a_terminal(
    stream: io.StringIO, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    to_stderr("stopping \x1b[31m")  # what comes from outside stays harmless
    assert stream.getvalue() == told
