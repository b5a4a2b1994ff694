"""`--quiet`, `--verbose` and `--json`."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.app import main
from paceline.cli.output import Output
from paceline.errors import ExitCode
from paceline.recipes.registry import BUILT_IN
from paceline.results.run_directory import RunDirectory
from paceline.runtime.spec import Launch
from tests.cli.conftest import Paceline, summary

_GOLDEN = Path(__file__).parents[1] / "results" / "golden" / "run"


def test_json_alone_on_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    output = Output(json=True)
    with output.apart():
        os.write(1, b"of this process\n")
        subprocess.run([sys.executable, "-Sc", "print('of a child')"], check=True)
    output.print_end(RunDirectory.named(_GOLDEN), ExitCode.DONE)
    captured = capfd.readouterr()
    assert captured.err == "of this process\nof a child\n"
    found = json.loads(captured.out)
    assert found["run_dir"] == str(_GOLDEN)
    assert found["exit_code"] == 0
    assert found.items() >= summary(_GOLDEN).items()


def test_json_of_a_training_that_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Output(json=True).print_end(RunDirectory.named(tmp_path), ExitCode.JOB)
    assert json.loads(capsys.readouterr().out) == {"run_dir": str(tmp_path), "exit_code": 65}


def test_no_json_of_a_training_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "digits", "--on", "slurm", "--json"]) == ExitCode.USAGE
    assert "--json has no effect with --on slurm" in capsys.readouterr().err


def test_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "--quiet"]) == ExitCode.DONE
    assert capsys.readouterr().out.split() == list(BUILT_IN)
    assert main(["recipes", "--json"]) == ExitCode.DONE
    found = json.loads(capsys.readouterr().out)
    assert list(found) == list(BUILT_IN)
    assert found["digits"]["settings"]["lr"] == 0.05
    assert found["digits"]["arguments"] == {"dropout": 0.2, "shift": 1}
    assert main(["recipes", "--verbose"]) == ExitCode.DONE
    assert "    --lr 0.05\n" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.ranks
def test_a_training_and_its_evaluation(
    paceline: Paceline, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    command = "train digits --epochs 1 --workers 2 --lr 0.04 --json --verbose --run-dir"
    done = paceline.run(*command.split(), run)
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["weights_sha256"] == summary(run)["weights_sha256"]
    assert "Finished 1 of 1 epoch" in done.err
    assert "  --lr" in done.err
    assert "(command line)" in done.err
    assert "(recipe)" in done.err
    # Quietly: not a word, and the same weights from its settings.
    again = tmp_path / "again"
    done = paceline.run("train", "--config", run / "run.json", "--quiet", "--run-dir", again)
    assert (done.code, done.out, done.err) == (0, "", "")
    assert summary(again)["weights_sha256"] == found["weights_sha256"]
    # The evaluation says the same figures.
    assert main(["evaluate", str(run), "--json"]) == ExitCode.DONE
    judged = json.loads(capsys.readouterr().out)
    assert judged["accuracy"] == pytest.approx(found["val_accuracy"])
    assert sum(each["samples"] for each in judged["classes"]) == judged["samples"] == 355
    assert main(["evaluate", str(run), "--quiet"]) == ExitCode.DONE
    assert "class" not in capsys.readouterr().out
    assert main(["evaluate", str(run), "--verbose"]) == ExitCode.DONE
    assert " taken for " in capsys.readouterr().out


@pytest.fixture
def launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """What would have been started, in a directory with a script and a stopped run of it."""
    started: list[Launch] = []
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").touch()
    run = RunDirectory(tmp_path / "run")
    shutil.copytree(_GOLDEN, run.path)
    run.summary_json.unlink()
    of_script = {"kind": "script", "recipe": "mine.py", "reference": str(tmp_path / "mine.py")}
    run.run_json.write_text(json.dumps(run.read_run() | of_script))

    def start(launch: Launch) -> int:
        started.append(launch)
        return ExitCode.JOB

    monkeypatch.setattr("paceline.runtime.start.start", start)
    return started


@pytest.mark.parametrize("command", [["run", "mine.py"], ["resume", "run"]])
def test_of_scripts(
    command: list[str], launches: list[Launch], capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main([*command, "--quiet", "--", "-v"] if command[0] == "run" else [*command, "--quiet"])
        == 65
    )
    (quiet,) = launches
    assert quiet.quiet
    assert quiet.config.metrics.progress == "off"
    assert quiet.request.script_args == (("-v",) if command[0] == "run" else ())
    assert capsys.readouterr().out == ""
    assert main([*command, "--json", "--verbose", "--epochs", "2"]) == ExitCode.JOB
    said = capsys.readouterr()
    assert json.loads(said.out)["exit_code"] == 65
    assert "  --epochs" in said.err


@pytest.mark.parametrize("command", [["train", "digits"], ["run", "mine.py"], ["resume", "run"]])
def test_quiet_goes_along_to_a_cluster(
    command: list[str], launches: list[Launch], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--quiet", "--on", "slurm", "--dry-run"]) == ExitCode.DONE
    assert "--quiet" in capsys.readouterr().out
    assert not launches
