"""`paceline init`: the project that it writes, by the commands that it prints."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from paceline.cli.app import main
from paceline.errors import ExitCode
from tests.cli.conftest import Paceline, summary
from tests.launch.waiting import patient


def _written(kind: str, where: Path, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """Write a project, and give the words of each command that is printed."""
    assert main(["init", kind, str(where)]) == ExitCode.DONE
    first, *commands = capsys.readouterr().out.splitlines()
    assert first.startswith(f"Written into {where}: README.md, job.toml, ")
    return [command.split() for command in commands]


@pytest.mark.slow
@pytest.mark.ranks
def test_a_project_does_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = tmp_path / "mine"
    change, *commands = _written("recipe", where, capsys)
    assert change == ["cd", str(where)]
    assert [words[:2] for words in commands] == [
        ["paceline", "train"],
        ["python", "-m"],
        ["paceline", "verify"],
    ]
    inside = Paceline(where)
    for program, *words in commands:
        if program == "python":
            _run_python(where, *words)
            continue
        done = inside.run(*words)
        assert done.code == 0, done.err
        if words[0] == "verify":
            assert "the training is the same as on 1 worker" in done.out
    (run,) = (where / "runs").iterdir()
    assert summary(run)["world_size"] == 2
    assert float(str(summary(run)["val_accuracy"])) > 0.9


@pytest.mark.slow
@pytest.mark.ranks
def test_a_script_trains_and_tests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = tmp_path / "mine"
    _, train, test, verify = _written("script", where, capsys)
    done = Paceline(where).run(*train[1:])
    assert done.code == 0, done.err
    (run,) = (where / "runs").iterdir()
    assert summary(run)["world_size"] == 2
    _run_python(where, *test[1:])
    assert verify[:3] == ["paceline", "verify", "train.py"]


def _run_python(where: Path, *words: str) -> None:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=where,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "OK" in done.stderr


@pytest.mark.parametrize("kind", ["recipe", "script"])
def test_what_is_written(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _written(kind, tmp_path / "mine", capsys)
    for path in (tmp_path / "mine").iterdir():
        assert path.suffix in (".py", ".toml", ".md"), path
        if path.suffix == ".py":
            compile(path.read_text(), path.name, "exec")
        assert max(map(len, path.read_text().splitlines())) <= 120
    assert tomllib.loads((tmp_path / "mine" / "job.toml").read_text())["workers"] == 2
    assert len((tmp_path / "mine" / "README.md").read_text().splitlines()) <= 22


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "task.py").write_text("mine")
    assert main(["init", "recipe", str(tmp_path)]) == ExitCode.USAGE
    assert "has task.py already, and nothing is overwritten" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["task.py"]
    assert main(["init", "recipe", str(tmp_path / "task.py" / "in")]) == ExitCode.USAGE
    assert "can't be written: Not a directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "init mine",
            "unknown kind of project 'mine'. Known: recipe, script. For a recipe in mine: ",
        ),
        ("init recipe a b", "unexpected 'b'. Usage: paceline init [recipe|script] [DIR]"),
        ("init --force", "unknown option '--force'. See paceline init"),
    ],
)
def test_wrong_usage(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == ExitCode.USAGE
    assert message in capsys.readouterr().err
