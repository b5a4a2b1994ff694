"""How the command's process ends."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.errors import ExitCode
from tests.cli.conftest import Paceline, wait_until
from tests.launch.waiting import patient

_ENDING = """
import atexit, sys, threading, time, types
import paceline.__main__ as process
from paceline.cli import app

class Kept:
    def __del__(self):
        print("taken apart")

kept = Kept()
sys.modules.setdefault("torch", types.ModuleType("torch"))
atexit.register(print, "registered before")

def main():
    atexit.register(print, "registered by the command")
    threading.Thread(target=lambda: (time.sleep(0.1), print("thread done"))).start()
    print("last words")
    return 65

app.main = main
process.run()
"""


def test_the_process_ends_in_order_but_isnt_taken_apart() -> None:
    command = [sys.executable, "-c", _ENDING]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(60), check=False)
    assert done.returncode == ExitCode.JOB
    assert done.stdout.splitlines() == [
        "last words",
        "thread done",
        "registered by the command",
        "registered before",
    ]
    assert done.stderr == ""


_INTERRUPTED = """
import os, signal, sys
import paceline.__main__ as process
from paceline.cli import app

def main():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        if sys.argv[1] == "twice":
            os.kill(os.getpid(), signal.SIGINT)
            print("still here")
        print("told")
        return 65

app.main = main
process.run()
"""


@pytest.mark.parametrize(("times", "out"), [("once", "told\n"), ("twice", "")])
def test_an_interrupted_command_ends_with_its_exit_code(times: str, out: str) -> None:
    command = [sys.executable, "-c", _INTERRUPTED, times]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(60), check=False)
    assert (done.returncode, done.stdout, done.stderr) == (ExitCode.RESUMABLE, out, "")


_INTERRUPTED_IMPORT = """
import os, signal, sys

class Interrupts:
    def find_spec(self, name, *_):
        if name == "paceline.cli.app":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
import paceline.__main__ as process
process.run()
"""


def test_an_interrupt_while_the_command_is_imported_leaves_no_traceback() -> None:
    command = [sys.executable, "-c", _INTERRUPTED_IMPORT, "recipes"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(60), check=False)
    expected = (ExitCode.RESUMABLE, "", "paceline: interrupted\n")
    assert (done.returncode, done.stdout, done.stderr) == expected


_INTERRUPTED_LIBRARY = """
import os, signal, sys
import paceline.__main__ as process
from paceline.cli.commands import recipes

def main(tokens):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        raise ImportError("cannot load module more than once per process")

recipes.main = main
process.run()
"""


def test_what_a_library_makes_of_an_interrupt_is_told_as_one() -> None:
    command = [sys.executable, "-c", _INTERRUPTED_LIBRARY, "recipes"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(60), check=False)
    expected = (ExitCode.RESUMABLE, "", "paceline: interrupted\n")
    assert (done.returncode, done.stdout, done.stderr) == expected


_STOPPED_EARLY = """
import os, sys
import paceline.__main__ as process
from paceline.launch.local import forkserver

def stopped(*_):
    os.kill(os.getpid(), number)

number = int(sys.argv.pop())
forkserver.prepare = stopped
process.run()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.core_cases(2)
def test_a_signal_before_there_are_workers_stops_the_training(number: int, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["train", "digits", "--device", "cpu", "--workers", "2", "--run-dir", str(run)]
    command = [sys.executable, "-c", _STOPPED_EARLY, *words, str(int(number))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(60), check=False)
    assert (done.returncode, done.stderr) == (ExitCode.RESUMABLE, "")
    assert "Stopped before the training began" in done.stdout
    assert not run.exists()


@pytest.mark.ranks
@pytest.mark.parametrize("command", ["evaluate RUN", "train digits --on here --epochs 1000"])
@pytest.mark.slow
def test_ctrl_c_again_and_again(command: str, cold_paceline: Paceline, tmp_path: Path) -> None:
    run = tmp_path / "run"
    if command.startswith("evaluate"):
        done = cold_paceline.run(*"train digits --on here --epochs 1 --run-dir".split(), run)
        assert done.code == 0, done.err
    process = cold_paceline.start(*command.replace("RUN", str(run)).split())
    maps = Path(f"/proc/{process.pid}/maps")
    wait_until(lambda: "libtorch_python" in maps.read_text(), "torch is being imported")
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)  # a person's fingers
    done = cold_paceline.finish(process)
    assert done.code == ExitCode.RESUMABLE, done.err


@pytest.mark.parametrize(
    ("streams", "code", "told"),
    [
        (">/dev/full", ExitCode.INFRASTRUCTURE, "paceline: standard output can't be written: No"),
        (">&-", ExitCode.DONE, ""),
        ("| true", ExitCode.DONE, ""),
        (">&- 2>&-", ExitCode.DONE, ""),
    ],
)
@pytest.mark.core_cases(2)
def test_a_result_that_cannot_be_printed(streams: str, code: int, told: str) -> None:
    words = f'set -o pipefail; "$0" -m paceline recipes {streams}'
    command = ["bash", "-c", words, sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr[: len(told) or 1]) == (code, told)


@pytest.mark.parametrize("streams", ["<&- >&- 2>&-", ">/dev/full 2>&1"])
@pytest.mark.slow
def test_a_training_needs_nobody_to_tell(streams: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = f'"$0" -m paceline train digits --workers 2 --epochs 1 --run-dir "$1" {streams}'
    command = ["bash", "-c", words, sys.executable, str(run)]
    done = subprocess.run(command, timeout=120, check=False)
    assert done.returncode == ExitCode.DONE
    assert (run / "summary.json").is_file()
    assert "attempt 0, rank 0 of 2" in (run / "logs" / "rank-0.log").read_text()
    assert "attempt 1" not in (run / "logs" / "rank-0.log").read_text()


@pytest.mark.parametrize("streams", ["2>&-", "2>/dev/full"])
def test_an_error_that_cannot_be_told_keeps_its_exit_code(streams: str) -> None:
    command = ["bash", "-c", f'"$0" -m paceline nonsense {streams}', sys.executable]
    done = subprocess.run(command, timeout=60, check=False)
    assert done.returncode == ExitCode.USAGE
