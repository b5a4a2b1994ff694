"""Processes that find their standard streams closed, full, or left by their reader."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.launch.local.streams import tolerant, why_lost

_SAYING = """
import os, sys
from paceline.launch.local.streams import open_closed_streams, tolerate_failing_output
open_closed_streams()
numbers = [os.open("/", os.O_RDONLY), sys.stdin.fileno(), sys.stdout.fileno(), sys.stderr.fileno()]
tolerate_failing_output()
for _ in range(3):
    print("said", flush=True)
    print("warned", file=sys.stderr, flush=True)
sys.stdout.buffer.write(b"bytes\\n")
sys.stdout.flush()
print("said without a flush")
sys.exit(10 + (numbers[0] > 2 and numbers[1:] == [0, 1, 2]))
"""


@pytest.mark.parametrize(
    "streams", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-", ">/dev/full", "2>/dev/full", "| true"]
)
def test_what_cannot_be_said_is_no_error(streams: str) -> None:
    command = ["bash", "-c", f'set -o pipefail; "$0" -c "$1" {streams}', sys.executable, _SAYING]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 11, done.stderr
    assert set(done.stderr.splitlines()) <= {"warned"}


def test_what_can_be_said_is() -> None:
    command = [sys.executable, "-c", _SAYING]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "said\nsaid\nsaid\nbytes\nsaid without a flush\n"
    assert done.stderr == "warned\n" * 3
    assert done.returncode == 11


def test_a_loss_is_known_afterwards() -> None:
    with Path(os.devnull).open("w") as null:
        descriptor = os.open("/dev/full", os.O_WRONLY)
        stream = tolerant(null, descriptor)
        assert why_lost(stream) is None
        print("said", file=stream, flush=True)
        error = why_lost(stream)
        assert error is not None
        assert error.strerror == "No space left on device"
        assert why_lost(null) is None
        os.close(descriptor)


def test_who_needs_a_reader_is_told_that_he_left() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with Path(os.devnull).open("w") as null:
        stream = tolerant(null, writer, needs_reader=True)
        with pytest.raises(BrokenPipeError):
            print("said", file=stream, flush=True)
        os.close(writer)
