"""Reads Python's stacks: those that faulthandler writes, and tracebacks."""

import os
import re
import sysconfig
from pathlib import Path

THREAD = re.compile(r"^(?:Current t|T)hread 0x[0-9a-f]+.*:$", re.MULTILINE)
"""The line above a thread's frames, as faulthandler writes it."""
_FRAME = re.compile(
    r'^  File "(?P<file>[^"]*)", line (?P<line>\d+|\?\?\?),? in (?P<name>.*)$', re.M
)
_LIBRARIES = tuple(
    {str(Path(sysconfig.get_path(name))) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_OURS = str(Path(__file__).parents[2]) + os.sep
_STARTERS = ("<frozen runpy>", *(_OURS + place + os.sep for place in ("launch", "script", "cli")))


def main_thread(stacks: str) -> str:
    """Give the frames of the main thread, the innermost first; it is the last one written."""
    starts = [match.start() for match in THREAD.finditer(stacks)]
    return stacks[starts[-1] :] if starts else ""


def without_launcher(stacks: str) -> str:
    """Leave out of stacks the outermost frames, which only started the worker."""
    kept, outside = [], False
    for line in stacks.splitlines():
        frame = _FRAME.match(line)
        outside = frame is not None and (outside or frame["file"].startswith(_STARTERS))
        if not outside:
            kept.append(line)
    return "\n".join(kept)


def own_frame(stacks: str, *, of_user: bool = False) -> str:
    """Give the user's innermost line of the main thread, as `file.py:12 in name`.

    Args:
        stacks: As faulthandler writes them, or a traceback.
        of_user: Give nothing where none is the user's, rather than the innermost of all.
    """
    # A traceback has its innermost frame last.
    frames = [*_FRAME.finditer(main_thread(stacks))] or [*_FRAME.finditer(stacks)][::-1]
    users = [frame for frame in frames if not _is_library(frame["file"])]
    chosen = users if of_user else users or frames
    if not chosen:
        return ""
    return f"{chosen[0]['file']}:{chosen[0]['line']} in {chosen[0]['name']}"


def _is_library(file: str) -> bool:
    return file.startswith(("<", _OURS, *_LIBRARIES)) or "site-packages" in file
