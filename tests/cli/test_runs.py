"""`paceline runs`, `compare` and `resume` without a path, on run directories that are there."""

import json
import os
import shutil
from pathlib import Path

import pytest

from paceline.cli.app import main
from paceline.errors import ExitCode
from paceline.results.run_directory import RunDirectory
from paceline.runtime.spec import Launch
from tests.cli.conftest import Paceline, summary

GOLDEN = Path(__file__).parents[1] / "results" / "golden"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory's runs: one that has finished, and a study's."""
    shutil.copytree(GOLDEN / "run", tmp_path / "runs" / "digits-20260302-101500")
    shutil.copytree(GOLDEN / "study", tmp_path / "runs" / "scale-digits-20260302-101600")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path / "runs"


def test_runs_are_listed_and_nothing_is_changed(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("*")}
    assert main(["runs"]) == ExitCode.DONE
    lines = capsys.readouterr().out.splitlines()
    (digits,) = (line.split() for line in lines if line.startswith("digits-"))
    assert digits[1:4] == ["digits", "finished", "94.65"]
    assert len([line for line in lines if line.endswith(" ago")]) == 7
    assert {path: path.stat().st_mtime_ns for path in runs.rglob("*")} == before


def test_runs_as_json(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(runs / "digits-20260302-101500"), "--json"]) == ExitCode.DONE
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["state"], found["epochs"], found["workers"]) == ("finished", 2, 2)
    assert main(["runs", str(runs / "digits-20260302-101500" / "snapshots"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_an_empty_list_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["runs"]) == ExitCode.DONE
    assert capsys.readouterr().err == f"There are no runs in {tmp_path}/runs\n"
    assert main(["runs", "nowhere"]) == ExitCode.USAGE
    assert "nowhere is no folder" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["evaluate", "report", "export", "resume"])
def test_a_run_is_named_where_its_directory_could_be(
    command: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory(runs / "digits-20260302-101500")
    described = run.read_run()
    assert isinstance(described["settings"], dict)
    described["settings"]["name"] = "lr/0.1 try"
    # So that each command ends there, naming the run.
    run.run_json.write_text(json.dumps(described | {"format": 9}))
    files = ["weights.pt"] if command == "export" else []
    for called in ("lr/0.1 try", run.path.name, "runs/digits-20260302-101500/", str(run.path)):
        assert main([command, called, *files]) == ExitCode.USAGE
        said = capsys.readouterr()
        assert str(run.path) in said.out + said.err, said.err
    assert main([command, "runs/digits-20260302-101501", *files]) == ExitCode.USAGE
    said = capsys.readouterr()
    assert f"no run directory runs/digits-20260302-101501, and no run below {runs} is" in said.err
    assert "Did you mean 'digits-20260302-101500'" in said.err
    assert "`paceline runs` lists them" in said.err


def test_resume_without_a_path_refuses_a_running_one(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory(runs / "digits-20260302-101500")
    run.summary_json.unlink()
    with run.lock():
        assert main(["resume"]) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert "runs/digits-20260302-101500, the newest that isn't finished, is still running" in said


@pytest.mark.parametrize(
    ("ended", "settings", "told"),
    [
        ("epochs", {}, "all 2 epochs. Nothing was changed.\n"),
        ("target", {"target_accuracy": 0.9}, "target accuracy 90 % reached"),
        ("patience", {"early_stopping": 1}, "no better validation result for 1 epoch"),
        ("time", {"time_budget": "2h"}, "time budget of 2h used"),
    ],
)
def test_resume_leaves_a_finished_run_as_it_is(
    ended: str,
    settings: dict[str, object],
    told: str,
    runs: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = RunDirectory(runs / "digits-20260302-101500")
    described, ending = run.read_run(), run.read_summary()
    assert isinstance(described["settings"], dict)
    described["settings"] |= settings
    run.run_json.write_text(json.dumps(described))
    run.summary_json.write_text(json.dumps(ending | {"stopped_because": ended}))
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("*")}
    assert main(["resume", str(run.path), "--workers", "1", "--tag", "a"]) == ExitCode.DONE
    said = capsys.readouterr()
    assert said.out.startswith(f"{run.path} has finished: ")
    assert told in said.out
    name = next(iter(settings), "epochs").replace("_", "-")
    named = dict.fromkeys((name, "epochs"))  # which are all trained
    # More epochs need no --allow-change where all of the run's own are trained.
    allowed = {each: f" --allow-change {each}" for each in named if each != "epochs"}
    option = " ".join(f"--{each} ...{allowed.get(each, '')}" for each in named)
    assert f"To train on: paceline resume {run.path} {option}\n" in said.out
    assert "No effect on a finished run: --tag, --workers\n" in said.err
    if ended != "target":  # there it asks for more of the training
        changed = ["resume", str(run.path), "--patience=1", "--allow-change", "patience"]
        assert main(changed) == ExitCode.DONE
        assert "No effect on a finished run: --patience\n" in capsys.readouterr().err
    assert main(["resume", str(run.path), "--json"]) == ExitCode.DONE
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["exit_code"] == 0
    assert {path: path.stat().st_mtime_ns for path in runs.rglob("*")} == before


def test_a_finished_script_goes_on_only_where_its_loop_may_be_longer(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, script = RunDirectory(runs / "digits-20260302-101500"), runs.parent / "mine.py"
    script.touch()
    of_script = {"kind": "script", "recipe": "mine.py", "reference": str(script), "given": []}
    run.run_json.write_text(json.dumps(run.read_run() | of_script))
    run.summary_json.write_text(json.dumps(run.read_summary() | {"stopped_because": "script"}))
    monkeypatch.setattr("paceline.runtime.start.start", lambda launch: 99)
    assert main(["resume", str(run.path)]) == ExitCode.DONE
    command = f"paceline resume {run.path} --allow-change"
    assert f"change the script's loop, then {command} epochs;" in capsys.readouterr().out
    assert main(["resume", str(run.path), "--allow-change", "epochs"]) == 99
    capsys.readouterr()
    # The script's own arguments may be others where that is said; what it says itself may not.
    other, allowed = ["--", "--epochs", "9"], ["--allow-change", "script-args"]
    assert main(["resume", str(run.path), *other]) == ExitCode.USAGE
    assert "others need --allow-change script-args" in capsys.readouterr().err
    assert main(["resume", str(run.path), *allowed, *other]) == 99
    options = ["--epochs", "99", "--allow-change", "epochs"]
    epochs = run.read_run()["settings"]["epochs"]  # type: ignore[index]
    assert main(["resume", str(run.path), *options]) == ExitCode.USAGE
    assert f"the script itself says epochs={epochs}" in capsys.readouterr().err
    later_s = run.summary_json.stat().st_mtime + 1
    os.utime(script, (later_s, later_s))
    assert main(["resume", str(run.path)]) == 99


@pytest.mark.parametrize("kind", ["recipe", "script"])
def test_a_fetched_run_is_copied_on_unless_something_says_otherwise(
    kind: str, runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, script = RunDirectory(runs / "digits-20260302-101500"), runs.parent / "mine.py"
    script.touch()
    run.summary_json.unlink()
    if kind == "script":
        of_script = {"kind": kind, "recipe": "mine.py", "reference": str(script)}
        run.run_json.write_text(json.dumps(run.read_run() | of_script))
    places: list[object] = []

    def start(launch: Launch) -> int:
        places.append(launch.config.snapshots.copy_to)
        return ExitCode.DONE

    monkeypatch.setattr("paceline.runtime.start.start", start)
    monkeypatch.setattr("paceline.cli.commands.resume._fetch", lambda url, where: (url, run))
    resume = ["resume", "s3://bucket/all/run"]
    assert main(resume) == main([*resume, "--copy-to", "file:///away"]) == ExitCode.DONE
    assert not capsys.readouterr().err
    assert main([*resume, "--hosts", "node1,node2"]) == ExitCode.DONE
    assert "Nothing more is copied to s3://bucket/all: with --hosts" in capsys.readouterr().err
    monkeypatch.setenv("PACELINE_COPY_TO", "file:///other")
    assert main(resume) == ExitCode.DONE
    assert places == ["s3://bucket/all", "file:///away", "none", "file:///other"]


@pytest.mark.slow
@pytest.mark.ranks
def test_a_named_training_is_found_by_its_labels_and_gone_on_with(paceline: Paceline) -> None:
    name = ("--name", "lr/0.1 try", "--tag", "a", "--tag", "b c", "--note", "a first one")
    short = ("--workers", "1", "--epochs", "1", "--target-accuracy", "none")
    done = paceline.run("train", "digits", *name, *short)
    assert done.code == 0, done.err
    (run,) = (paceline.directory / "runs").iterdir()
    assert run.name.startswith("lr-0.1-try-2")
    (found,) = json.loads(paceline.run("runs", "--json").out)
    assert (found["name"], found["tags"]) == ("lr/0.1 try", ["a", "b c"])
    assert found["note"] == "a first one"
    assert paceline.run("resume").code == ExitCode.USAGE  # it has finished
    (run / "summary.json").unlink()  # as where it was killed
    again = paceline.run("resume", "--epochs", "2", "--allow-change", "epochs")
    assert again.code == 0, again.err
    assert f"Resuming runs/{run.name}" in again.err
    assert summary(run)["epochs"] == 2


def test_runs_are_compared(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, trained = "digits-20260302-101500", "scale-digits-20260302-101600/trained/2-powersgd"
    assert main(["compare", first, f"runs/{trained}"]) == ExitCode.DONE
    out = capsys.readouterr().out
    assert f"A  {runs / first}\nB  {runs / trained}\n" in out
    assert "\nsync  " in out
    assert "\nvalidation loss  " in out
    assert main(["compare", first]) == ExitCode.USAGE
    assert "name 2 to 26 run directories" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["digits-20260302-101500", "scale-digits-20260302-101600"])
def test_a_page_is_written_elsewhere_and_over_nothing_else(
    what: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("*")}
    for _ in range(2):  # over an older page of its own
        assert main(["report", str(runs / what), "--html", "mine.html"]) == ExitCode.DONE
    assert capsys.readouterr().out == "mine.html\n" * 2
    assert "digits" in Path("mine.html").read_text()
    assert {path: path.stat().st_mtime_ns for path in runs.rglob("*")} == before
    Path("mine.html").write_text("<p>of somebody else")
    for words, why in (
        (["--html", "mine.html"], "mine.html is there, and is no page of `paceline report`"),
        (["--html", "no/where.html"], "there is no directory for it"),
    ):
        assert main(["report", str(runs / what), *words]) == ExitCode.USAGE
        assert why in capsys.readouterr().err
    assert Path("mine.html").read_text() == "<p>of somebody else"
