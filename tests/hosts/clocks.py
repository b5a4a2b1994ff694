"""Hosts whose clocks are wrong: a library, compiled here, that their programs load first."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

_SOURCE = Path(__file__).with_name("clockshift.c")


def shifted(directory: Path, shifts_s: Mapping[int, int]) -> dict[int, dict[str, str]]:
    """Give the environments of hosts, by number, whose clocks are to be off by so many seconds.

    Args:
        directory: Where the library goes; all hosts see it.
        shifts_s: By how much each host's clock is ahead.
    """
    library = directory / "clockshift.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(_SOURCE), "-ldl"]
    subprocess.run(command, check=True, capture_output=True)
    return {
        n: {"LD_PRELOAD": str(library), "CLOCK_SHIFT_S": str(shift_s)}
        for n, shift_s in shifts_s.items()
    }
