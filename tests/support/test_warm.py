import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.waiting import patient, until
from tests.support.warm import WarmPython, run_warm

_SHOW = """
import os, sys, warnings
warnings.warn("careful", UserWarning)
print(sys.argv[1:], os.environ["TOLD"], os.getcwd(), __name__, "torch" in sys.modules)
"""


def test_it_is_as_if_the_interpreter_had_begun(tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text(_SHOW)
    done = run_warm([sys.executable, str(script), "a", "b c"], tmp_path, TOLD="here")
    assert done.stdout == f"['a', 'b c'] here {tmp_path} __main__ True\n"
    assert "UserWarning: careful" in done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("sys.exit(3)", 3, ""),
        ("sys.exit('no')", 1, "no\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("os.kill(os.getpid(), 9)", -9, ""),
    ],
)
def test_how_it_ends(line: str, code: int, words: str, tmp_path: Path) -> None:
    script = tmp_path / "end.py"
    script.write_text(f"import os, sys\n{line}\n")
    done = run_warm([sys.executable, str(script)], tmp_path)
    assert done.returncode == code
    assert done.stderr.endswith(words)


def test_it_heeds_signals_in_a_session_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "wait.py"
    script.write_text("import os, time\nos.rename('wait.py', 'begun')\ntime.sleep(60)\n")
    with WarmPython(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=dict(os.environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        until((tmp_path / "begun").exists)
        assert os.getsid(process.pid) == process.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(patient(60)) == -signal.SIGTERM
