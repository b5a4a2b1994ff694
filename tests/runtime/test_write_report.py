"""The report at the end of a training never costs the training its end."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.launch.signals import STOP_SIGNALS
from paceline.results.run_directory import RunDirectory
from paceline.runtime.write_report import write_report, write_report_apart
from tests.launch.waiting import patient

_APART = """
import sys
from paceline.runtime.write_report import write_report_apart
from paceline.results.run_directory import RunDirectory
write_report_apart(RunDirectory.named(sys.argv[1]))
print(sorted({"jinja2", "matplotlib", "torch"} & set(sys.modules)))
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "a run")
    run.create()
    run.run_json.write_text('{"recipe": "digits"}')
    return run


def test_what_draws_the_report_stays_out_of_this_process(run: RunDirectory) -> None:
    command = [sys.executable, "-c", _APART, str(run.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(60), check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")
    assert "<html" in run.report_html.read_text()


def test_a_report_that_fails_apart_is_told(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    run.run_json.unlink()
    write_report_apart(run)
    assert capsys.readouterr().err == (
        f"paceline: the report could not be written: {run.path} holds no training "
        "(no run.json) and no scaling study (no study.json)\n"
        f"Try again: paceline report '{run.path}'\n"
    )


@pytest.mark.parametrize(
    "error",
    [OSError("disk full"), OSError(errno.ENOSPC, "No space left"), RuntimeError("a fault of ours")],
    ids=str,
)
def test_a_report_that_fails_here_is_told(
    error: Exception,
    run: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(run: RunDirectory) -> Path:
        raise error

    monkeypatch.setattr("paceline.report.page.write_run_report", fail)
    write_report(run)
    told = capsys.readouterr().err
    assert (
        f"{error.strerror or error}" in told if isinstance(error, OSError) else str(error) in told
    )
    assert "[Errno" not in told
    assert ("Traceback" in told) == isinstance(error, RuntimeError)
    assert f"paceline report '{run.path}'" in told


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_breaks_off_the_report_alone(
    number: signal.Signals,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def render(run: RunDirectory) -> Path:
        os.kill(os.getpid(), number)
        raise AssertionError("it went on")

    monkeypatch.setattr("paceline.report.page.write_run_report", render)
    handlers = [signal.getsignal(each) for each in STOP_SIGNALS]
    write_report(RunDirectory(tmp_path))
    told = capsys.readouterr().err
    assert f"the report could not be written: {number.name} came meanwhile" in told
    assert f"paceline report {tmp_path}" in told
    assert [signal.getsignal(each) for each in STOP_SIGNALS] == handlers
