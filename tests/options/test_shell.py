import shlex
from pathlib import Path

from paceline.options.shell import command_line


def test_a_command_can_be_pasted() -> None:
    line = command_line("resume", Path("/tmp/my runs/it's"))
    assert shlex.split(line) == ["paceline", "resume", "/tmp/my runs/it's"]
    assert command_line("resume", "/tmp/run") == "paceline resume /tmp/run"
