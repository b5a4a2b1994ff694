import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paceline.launch.local import forkserver
from tests.launch.waiting import alive, until
from tests.support.leaks import find_leaks, look_around

Undo = Callable[[], object]


def leave_thread(scratch: Path) -> Undo:
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="left")
    thread.start()

    def undo() -> None:
        release.set()
        thread.join()

    return undo


def leave_process(scratch: Path) -> Undo:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    return child.communicate


def leave_variable(scratch: Path) -> Undo:
    os.environ["PACELINE_LEFT"] = "1"
    return lambda: os.environ.pop("PACELINE_LEFT")


def leave_setting(scratch: Path) -> Undo:
    torch.set_default_dtype(torch.float64)
    return lambda: torch.set_default_dtype(torch.float32)


def kill_the_fork_server(scratch: Path) -> Undo:
    forkserver.prepare((), 1)
    server = forkserver.server_pid()
    assert server is not None
    os.kill(server, signal.SIGKILL)
    until(lambda: not alive(server))
    return forkserver.release


def leave_file(scratch: Path) -> Undo:
    return (scratch / "left").open("w").close


@pytest.mark.parametrize(
    ("leave", "named"),
    [
        (leave_thread, "thread left"),
        (leave_process, "process "),
        (leave_variable, "variable PACELINE_LEFT: None became '1'"),
        (leave_setting, "setting torch default type"),
        (leave_file, "open file "),
        (kill_the_fork_server, "the fork server that tests share, killed"),
    ],
)
def test_what_is_left_behind_is_named(
    leave: Callable[[Path], Undo],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.support.leaks._GRACE_S", 0.05)
    before = look_around()
    assert find_leaks(before, tmp_path) == []
    undo = leave(tmp_path)
    try:
        leaks = find_leaks(before, tmp_path)
    finally:
        undo()
    assert len(leaks) == 1
    assert leaks[0].startswith(named)
    assert find_leaks(before, tmp_path) == []
