import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.launch.errors.python_stacks import own_frame, without_launcher
from paceline.launch.watchdog.stack_dump import collect_stacks
from tests.launch.waiting import until
from tests.launch.watchdog.states import IN_STEP

_ANSWERING = """
import faulthandler, re, signal, sys, threading, time
log = open(sys.argv[1], "a")
faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
log.write("what was printed before\\n")
log.flush()
def lock_the_interpreter():
    print("locking", file=log, flush=True)
    re.match("(a?){40}a{40}", "a" * 40)
def wait_for_ever():
    print("waiting", file=log, flush=True)
    time.sleep(300)
"""
Start = Callable[[str, Path], subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    started = []

    def run(code: str, log: Path) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", _ANSWERING + code, log]))
        until(lambda: log.exists() and log.stat().st_size > 0)
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()


def test_a_worker_that_sleeps_answers(start: Start, tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    process = start("wait_for_ever()", log)
    until(lambda: "waiting" in log.read_text())
    stacks = collect_stacks([replace(IN_STEP, pid=process.pid)], tmp_path)
    assert "in wait_for_ever" in stacks[0]
    assert "printed before" not in stacks[0]
    assert own_frame(stacks[0]).endswith("in wait_for_ever")


def test_a_worker_answers_whose_interpreter_is_locked(start: Start, tmp_path: Path) -> None:
    code = "threading.Thread(target=lock_the_interpreter, daemon=True).start()\nwait_for_ever()"
    log = tmp_path / "rank-0.log"
    process = start(code, log)
    until(lambda: "locking" in log.read_text())
    stacks = collect_stacks([replace(IN_STEP, pid=process.pid)], tmp_path)
    assert "in lock_the_interpreter" in stacks[0]
    assert "in <module>" in stacks[0]


def test_a_stopped_worker_isnt_waited_for(start: Start, tmp_path: Path) -> None:
    process = start("wait_for_ever()", tmp_path / "rank-0.log")
    process.send_signal(signal.SIGSTOP)
    states = [replace(IN_STEP, pid=process.pid, process="stopped")]
    assert collect_stacks(states, tmp_path) == {}


_STACKS = """Thread 0x00007f01 (most recent call first):
  File "/home/me/loader.py", line 3 in read

Current thread 0x00007f02 (most recent call first):
  File "/x/site-packages/torch/autograd/graph.py", line 1113 in backward
  File "{ours}/trainer/step.py", line 87 in backward
  File "/home/me/train.py", line 26 in train
  File "/home/me/train.py", line 40 in <module>
  File "<frozen runpy>", line 88 in _run_code
  File "{ours}/launch/worker.py", line 67 in work
  File "/x/site-packages/torch/distributed/elastic/api.py", line 7 in wrapper"""


def test_the_users_own_line_is_found() -> None:
    import paceline

    stacks = _STACKS.format(ours=Path(paceline.__file__).parent)
    assert own_frame(stacks) == "/home/me/train.py:26 in train"
    assert own_frame("") == ""
    short = without_launcher(stacks)
    assert short.endswith("line 40 in <module>")
    assert 'loader.py", line 3 in read' in short
