import os
import shlex
import signal
import threading
from pathlib import Path

import pytest

from paceline.errors import InfrastructureError, UsageError
from paceline.launch.ssh.parallel_commands import Commands, on_each
from tests.launch.waiting import alive, until


class _Interrupt(BaseException):
    pass


_ENDLESS = "sleep 1000 & echo $! > {}.new && mv {}.new {}; wait"


def endless(started: Path, commands: Commands) -> None:
    commands.run(["sh", "-c", _ENDLESS.replace("{}", shlex.quote(str(started)))], 600.0)


def started(files: list[Path]) -> None:
    until(lambda: all(file.exists() for file in files))


def test_ctrl_c_ends_what_runs_on_all_hosts(tmp_path: Path) -> None:
    files = [tmp_path / "a", tmp_path / "b"]

    def interrupt(*_: object) -> None:
        raise _Interrupt

    def press() -> None:
        started(files)
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    thread = threading.Thread(target=press)
    thread.start()
    try:
        with pytest.raises(_Interrupt):
            on_each(files, endless)
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    until(lambda: all(not alive(int(file.read_text())) for file in files))


def test_another_thread_can_stop_it(tmp_path: Path) -> None:
    file, stop = tmp_path / "a", threading.Event()

    def set_it() -> None:
        started([file])
        stop.set()

    thread = threading.Thread(target=set_it)
    thread.start()
    with pytest.raises(InfrastructureError, match="stopped"):
        on_each([file], endless, stop)
    thread.join()
    until(lambda: not alive(int(file.read_text())))


def test_one_that_fails_ends_the_others(tmp_path: Path) -> None:
    files = [tmp_path / "a", tmp_path / "b"]

    def work(file: Path, commands: Commands) -> None:
        if file.name == "b":
            started(files[:1])
            raise UsageError("b is wrong")
        endless(file, commands)

    with pytest.raises(UsageError, match="b is wrong"):
        on_each(files, work)
    until(lambda: not alive(int(files[0].read_text())))


def test_nothing_is_started_once_they_were_ended() -> None:
    commands = Commands()
    commands.end()
    with pytest.raises(InfrastructureError, match="sh wasn't started"):
        commands.run(["sh"], 600.0)
