"""Faults of the machine around a training: clock, streams, ports, load, another training."""

import contextlib
import os
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.injection.kind import Act, Kind, struck
from benchmarks.injection.training import BrokenPromiseError, Training

_CLOCK = Path(__file__).with_name("clockjump.c")
_TORCHS_PORTS = (29400, 29500)


def no_compiler() -> str:
    """Say that there is no C compiler."""
    return "" if shutil.which("cc") else "a C compiler (cc)"


def _with_clock(training: Training) -> None:
    library, offset = training.room / "clockjump.so", training.room / "offset"
    words = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(_CLOCK), "-ldl"]
    subprocess.run(words, check=True, capture_output=True)
    offset.write_bytes(bytes(8))
    training.variables |= {"LD_PRELOAD": str(library), "CLOCK_OFFSET": str(offset)}


def _jump(training: Training) -> None:
    jump_s = training.random.choice((-86400, -3600, -30, 30, 3600, 86400))
    _set_clock(training, jump_s)
    training.release()
    time.sleep(training.drawn.delay_s)
    _set_clock(training, jump_s // 2)


def _set_clock(training: Training, offset_s: int) -> None:
    # In place: it is mapped, and a process that reads it while it is empty gets SIGBUS.
    with (training.room / "offset").open("r+b") as file:
        file.write(struct.pack("=q", offset_s))


def _without_clock(training: Training) -> None:
    training.variables.clear()


def _shell(redirection: str) -> Act:
    def before(training: Training) -> None:
        training.wrap = ["sh", "-c", f'exec "$@" {redirection}', "sh"]

    return before


def _unwrapped(training: Training) -> None:
    training.wrap = []


def _reader_gone(training: Training) -> None:
    # Its standard output is a pipe whose reader goes away after the first line.
    training.wrap = [sys.executable, "-c", _PIPED]


_PIPED = """
import os, sys
read, write = os.pipe()
if os.fork() == 0:
    os.close(write)
    os.read(read, 1)
    os._exit(0)
os.close(read)
os.dup2(write, 1)
os.close(write)
os.execvp(sys.argv[1], sys.argv[1:])
"""


def _squat(training: Training) -> None:
    for port in _TORCHS_PORTS:
        with contextlib.suppress(OSError):  # somebody else sits there: that will do
            squatter = socket.create_server(("", port))
            training.held.append(squatter)


def _leave_ports(training: Training) -> None:
    for squatter in training.held:
        squatter.close()
    training.held.clear()


def _start_another(verb: str) -> Act:
    """Start a second command in the same directory, which has to be refused."""

    def strike(training: Training) -> None:
        output = training.room / "another.txt"
        words = training.beginning() if verb == "train" else training.command()
        with output.open("wb") as file:
            another = training.popen(words, file)
            code = another.wait(120)
        text = output.read_text()
        if code != 2 or not ("is running in" in text or "already holds a training" in text):
            raise BrokenPromiseError(f"a second {verb} in the directory gave {code}:\n{text}")

    return strike


def _two_at_once(training: Training) -> None:
    """Start two trainings in one directory at the same time: one of them trains."""
    output = training.room / "another.txt"
    with output.open("wb") as file:
        another = training.popen(training.beginning(), file)
        training.start(held=False)
        code = another.wait(240)
    mine = training.end((0, 2))
    if sorted((code, mine.code)) != [0, 2]:
        raise BrokenPromiseError(f"two at once gave {code} and {mine.code}:\n{output.read_text()}")


def _load(training: Training) -> None:
    spin = ["sh", "-c", "while :; do :; done"]
    for _ in range(4 * (os.cpu_count() or 1)):
        training.helpers.append(subprocess.Popen(spin, start_new_session=True))
    training.release()
    time.sleep(1 + training.drawn.delay_s)
    for helper in training.helpers:
        helper.kill()


def _closed(name: str, redirection: str, says: str = "") -> Kind:
    return struck(
        name, lambda training: None, before=_shell(redirection), after=_unwrapped, says=says
    )


KINDS: Sequence[Kind] = (
    struck(
        "the clock jumps, twice", _jump, before=_with_clock, after=_without_clock, needs=no_compiler
    ),
    _closed("standard input closed", "<&-", "Finished"),
    _closed("standard output closed", ">&-"),
    _closed("standard error closed", "2>&-", "Finished"),
    _closed("all standard streams closed", "<&- >&- 2>&-"),
    _closed("standard output to /dev/full", ">/dev/full"),
    _closed("standard error to /dev/full", "2>/dev/full", "Finished"),
    struck(
        "standard output a pipe that nobody reads",
        lambda training: None,
        before=_reader_gone,
        after=_unwrapped,
    ),
    struck(
        "torch's usual ports taken",
        lambda training: None,
        before=_squat,
        after=_leave_ports,
        says="Finished",
    ),
    struck("a second training in the directory", _start_another("train"), says="Finished"),
    struck("a resume while it trains", _start_another("resume"), says="Finished"),
    Kind(name="two trainings begun in one directory at once", play=_two_at_once),
    struck("a load of four processes a core", _load),
)
