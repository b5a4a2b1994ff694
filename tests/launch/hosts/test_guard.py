import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from paceline import __version__
from paceline.launch.hosts.guard import Guard
from tests.launch.waiting import alive, until

pytestmark = pytest.mark.ranks

_ATTEMPT = "paceline.launch.hosts.attempt"


@contextmanager
def _guard() -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "paceline.launch.hosts.guard"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def _say(guard: "subprocess.Popen[str]", **message: object) -> None:
    assert guard.stdin is not None
    guard.stdin.write(json.dumps(message) + "\n")
    guard.stdin.flush()


def _hear(guard: "subprocess.Popen[str]", what: str) -> dict[str, object]:
    assert guard.stdout is not None
    for line in guard.stdout:
        message: dict[str, object] = json.loads(line)
        if message["is"] == what:
            return message
    raise AssertionError(f"the guard never said {what}")


def test_it_says_what_it_is_and_gives_signs_of_life() -> None:
    with _guard() as guard:
        _say(guard, do="hello", nonce="abc")
        ready = _hear(guard, "ready")
        assert (ready["nonce"], ready["paceline"]) == ("abc", __version__)
        _say(guard, do="beat", n=7)
        assert _hear(guard, "beat")["n"] == 7


def test_what_isnt_paceline_is_not_started(tmp_path: Path) -> None:
    with _guard() as guard:
        for module in ("os", "paceline.x;id", "../paceline"):
            _say(guard, do="start", id="1", module=module, payload={}, directory=str(tmp_path))
            assert "no part of Paceline" in str(_hear(guard, "problem")["text"])


def test_a_directory_that_isnt_there_is_named(tmp_path: Path) -> None:
    with _guard() as guard:
        _say(guard, do="start", id="1", module=_ATTEMPT, payload={}, directory=f"{tmp_path}/no")
        assert f"{tmp_path}/no" in str(_hear(guard, "problem")["text"])
        assert _hear(guard, "ended")["code"] == 70


def test_output_and_end_of_a_process_are_passed_on(tmp_path: Path) -> None:
    with _guard() as guard:
        module = "paceline.no_such_module"
        _say(guard, do="start", id="1", module=module, payload={}, directory=str(tmp_path))
        assert "No module named" in str(_hear(guard, "output")["text"])
        assert _hear(guard, "ended")["code"] == 1


@pytest.mark.parametrize("how", ["end of input", "SIGTERM"])
def test_nothing_outlives_it(tmp_path: Path, how: str) -> None:
    with _guard() as guard:
        _say(guard, do="start", id="1", module="paceline.launch.monitor", directory=str(tmp_path))
        _say(guard, do="start", id="2", module=_ATTEMPT, directory=str(tmp_path))
        until(lambda: bool(psutil.Process(guard.pid).children(recursive=True)))
        children = [p.pid for p in psutil.Process(guard.pid).children(recursive=True)]
        assert guard.stdin is not None
        if how == "SIGTERM":
            guard.terminate()
        else:
            guard.stdin.close()
        assert guard.wait(10) == 0
        until(lambda: not any(map(alive, children)), 10)


def test_its_lease_ends_where_nobody_speaks() -> None:
    source, speaks = os.pipe()
    hears, target = os.pipe()
    try:
        guard = Guard(source, target, lease_s=0.2)
        thread = threading.Thread(target=guard.run)
        thread.start()
        os.write(speaks, b'{"do": "beat", "n": 1}\n')
        assert json.loads(os.read(hears, 1000))["n"] == 1
        thread.join(10)
        assert not thread.is_alive()
    finally:
        os.close(target)
        for descriptor in (source, speaks, hears):
            os.close(descriptor)
