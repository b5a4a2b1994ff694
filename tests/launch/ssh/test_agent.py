import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline import __version__
from paceline.launch.ssh import agent as ours
from paceline.launch.ssh.agent import Agent
from tests.launch.waiting import alive, patient, until

pytestmark = pytest.mark.ranks

_ATTEMPT = "paceline.launch.hosts.attempt"


_BY_NAME = ("-m", "paceline.launch.hosts.guard")


@contextmanager
def _guard(how: Sequence[str] = _BY_NAME) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [sys.executable, "-P", *how],
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
        _say(guard, do="start", id="1", module="paceline.launch.watchdog", directory=str(tmp_path))
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


def test_a_process_that_reads_nothing_holds_up_nobody(tmp_path: Path) -> None:
    with _guard() as guard:
        _say(guard, do="start", id="1", module=_ATTEMPT, directory=str(tmp_path))
        me = psutil.Process(guard.pid)
        until(lambda: bool(me.children()))
        (child,) = me.children()
        child.suspend()
        _say(guard, do="say", id="1", message="x" * 1_000_000)
        _say(guard, do="beat", n=1)
        assert _hear(guard, "beat")["n"] == 1
        assert guard.stdin is not None
        guard.stdin.close()
        assert guard.wait(10) == 0
        until(lambda: not alive(child.pid), 10)


def test_all_that_a_process_says_comes_before_its_end(tmp_path: Path) -> None:
    _write_module(
        tmp_path,
        """
import os
open("begun", "w").close()
with os.fdopen(int(os.environ["PACELINE_GUARD_FD"]), "w") as said:
    for n in range(700):  # more than fits in one pipe, less than in two
        said.write('{"n": %d, "pad": "%s"}\\n' % (n, "x" * 100))
""",
    )
    with _guard(_starting_from(tmp_path, "a._ORPHAN_S = 0.0; a._BACKLOG = 10")) as guard:
        _say(guard, do="start", id="1", module="paceline.loud", directory=str(tmp_path))
        until(lambda: (tmp_path / "begun").exists())
        until(lambda: not psutil.Process(guard.pid).children())
        assert guard.stdout is not None
        said: list[dict[str, Any]] = []
        for line in guard.stdout:
            said.append(json.loads(line))
            if said[-1]["is"] == "ended":
                break
    assert [message["message"]["n"] for message in said[:-1]] == list(range(700))
    assert said[-1]["code"] == 0


def test_what_a_process_leaves_behind_is_ended_and_others_are_not(tmp_path: Path) -> None:
    _write_module(
        tmp_path,
        """
import subprocess, sys
inner = "import subprocess; subprocess.Popen(['sleep', '600']).wait()"
subprocess.Popen([sys.executable, "-c", inner], start_new_session=True)
""",
    )
    (tmp_path / "paceline" / "waiting.py").write_text("while input(): pass")
    with _guard(_starting_from(tmp_path)) as guard:
        _say(guard, do="start", id="1", module="paceline.waiting", directory=str(tmp_path))
        me = psutil.Process(guard.pid)
        until(lambda: bool(me.children()))
        (other,) = me.children()
        _say(guard, do="start", id="2", module="paceline.loud", directory=str(tmp_path))
        assert _hear(guard, "ended")["id"] == "2"
        assert me.children(recursive=True) == [other]


def _starting_from(directory: Path, changes: str = "") -> Sequence[str]:
    """Give a guard that starts modules of the Paceline of `_write_module`."""
    change = f"import os; os.environ['PYTHONPATH'] = {str(directory)!r}; {changes}"
    return "-c", f"from paceline.launch.ssh import agent as a; {change}\na.main()"


def _write_module(directory: Path, content: str) -> None:
    """Write a Paceline of one's own, whose one module is `paceline.loud`."""
    package = directory / "paceline"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "loud.py").write_text(content)


@contextmanager
def _serving(lease_s: float, leave: Callable[[], None]) -> Iterator[tuple[int, int]]:
    """Run a guard in a thread. Gives where to speak and where it is heard."""
    source, speaks = os.pipe()
    hears, target = os.pipe()
    try:
        guard = Agent(source, target, leave, lease_s=lease_s)
        thread = threading.Thread(target=guard.run)
        thread.start()
        yield speaks, hears
        thread.join(10)
        assert not thread.is_alive()
    finally:
        for descriptor in (source, speaks, hears, target):
            os.close(descriptor)


def test_its_lease_ends_where_nobody_speaks() -> None:
    left = threading.Event()
    with _serving(0.2, left.set) as (speaks, hears):
        os.write(speaks, b'{"do": "beat", "n": 1}\n')
        assert json.loads(os.read(hears, 1000))["n"] == 1
    assert not left.is_set()


def test_it_ends_by_a_signal_that_interrupts_nothing() -> None:
    source, speaks = os.pipe()
    hears, target = os.pipe()
    ending, ends = os.pipe()
    try:
        thread = threading.Thread(target=Agent(source, target, lambda: None, ending=ending).run)
        thread.start()
        os.write(speaks, b'{"do": "beat", "n": 1}\n')
        assert json.loads(os.read(hears, 1000))["n"] == 1
        os.write(ends, b"!")
        thread.join(5)  # half a lease
        assert not thread.is_alive()
    finally:
        for descriptor in (source, speaks, hears, target, ending, ends):
            os.close(descriptor)


def test_its_lease_ends_where_the_main_thread_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    left = threading.Event()
    stuck = threading.Event()

    def introduce(message: object) -> dict[str, object]:
        stuck.wait(patient(30))
        return {}

    monkeypatch.setattr(ours, "_introduction", introduce)
    monkeypatch.setattr(ours, "_STUCK_S", 0.1)
    with _serving(0.2, left.set) as (speaks, _):
        os.write(speaks, b'{"do": "hello"}\n')
        assert left.wait(10)
        stuck.set()
