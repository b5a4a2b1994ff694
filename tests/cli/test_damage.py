"""Files of ours that hold what nobody of us wrote: a sentence and an exit code, never a traceback.

What is asked is that no command hangs, fails by an error of its own, or believes what can't be.
"""

import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest

from paceline.cli.app import main
from paceline.errors import ExitCode
from tests.cli.conftest import Paceline, newest_step, summary

Spoil = Callable[[Path], None]
_RUN = ("train", "digits", "--workers", "1", "--epochs", "1", "--global-batch", "256")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory of a training that has ended."""
    run = tmp_path_factory.mktemp("damage") / "run"
    paceline = Paceline(run.parent)
    ended = paceline.run(*_RUN, "--run-dir", run)
    assert ended.code == ExitCode.DONE, ended.err
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy to be spoiled."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture(autouse=True)
def _no_hang() -> Iterator[None]:
    def late(number: int, frame: FrameType | None) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(180)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def _of(content: bytes) -> Spoil:
    def spoil(path: Path) -> None:
        path.write_bytes(content)

    return spoil


def _pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def _zeros(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def _directory(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def _changed(**parts: object) -> Spoil:
    def spoil(path: Path) -> None:
        path.write_text(json.dumps({**json.loads(path.read_text()), **parts}))

    return spoil


NOT_JSON: dict[str, Spoil] = {
    "text": _of(b"hello\n"),
    "not UTF-8": _of(b'{"format": "\xff\xfe"}'),
    "deep": _of(b"[" * 200_000),
    "5 MB": _of(b"[" + b"1," * 2_500_000 + b"1]"),
    "beyond any size": _of(b" " * (17 << 20)),
    "a pipe": _pipe,
    "a device": _zeros,
    "a directory": _directory,
}
WRONG_RUN: dict[str, Spoil] = {
    "format 99": _changed(format=99),
    "no settings": _changed(settings=None),
    "a setting of another type": _changed(settings={"epochs": "many"}),
    "an unknown setting": _changed(settings={"moons": 3}),
    "a world of text": _changed(derived={"world_size": "two", "global_batch": 64}),
    "an argument that is an object": _changed(recipe_arguments={"data_dir": {"a": 1}}),
    "a recipe that is none": _changed(reference="\x1b]0;owned\x07"),
}


def _refused(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """What a command says that ends with 2: a sentence, without control characters."""
    code = main([str(word) for word in words])
    said = capsys.readouterr()
    assert code == ExitCode.USAGE, said.err
    assert said.err.startswith("paceline: ")
    assert "Traceback" not in said.err + said.out
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", said.err)
    assert len(said.err) < 2000
    return said.err


@pytest.mark.parametrize("spoil", [*NOT_JSON, *WRONG_RUN])
@pytest.mark.slow
def test_run_json(spoil: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    {**NOT_JSON, **WRONG_RUN}[spoil](run / "run.json")
    (run / "summary.json").unlink()  # of a finished one resume says so, and reads no further
    _refused(capsys, "resume", run)
    if spoil in NOT_JSON or spoil.startswith("format"):
        for command in (("evaluate", run), ("export", run, run / "x.pt"), ("report", run)):
            assert "run.json" in _refused(capsys, *command)


FOREIGN: dict[str, Spoil] = {
    "of something else": _of(b'{"name": "web", "command": ["npm"]}'),
    **{name: NOT_JSON[name] for name in ("text", "a directory")},
}
_READERS = (
    "report",
    "compare",
    "export x.pt",
    "resume",
    "predict --link 25gbit",
)


@pytest.mark.parametrize("spoil", FOREIGN)
@pytest.mark.parametrize("words", _READERS)
def test_a_directory_whose_run_json_is_something_elses(
    words: str,
    spoil: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is no run: no command reads it as one, or writes into it."""
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    FOREIGN[spoil](Path("mine/run.json"))
    command, *others = words.split()
    _refused(capsys, command, "mine", *others)
    assert [path.name for path in Path("mine").iterdir()] == ["run.json"]
    assert [path.name for path in Path().iterdir()] == ["mine"]


@pytest.mark.parametrize("spoil", NOT_JSON)
def test_profile_json(spoil: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    NOT_JSON[spoil](run / "profile.json")
    assert "profile.json" in _refused(capsys, "predict", run, "--link", "25gbit")


@pytest.mark.parametrize(
    "spoil",
    [
        _changed(format=99),
        _changed(world_size="2"),
        _changed(workers=[1]),
        _changed(step_s={"median": 0, "low": 0, "high": 0}),
    ],
)
def test_a_profile_of_wrong_types(
    spoil: Spoil, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(run / "profile.json")
    assert "profile.json" in _refused(capsys, "predict", run, "--link", "25gbit")


@pytest.mark.parametrize("spoil", NOT_JSON)
def test_files_without_which_a_command_goes_on(
    spoil: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = ("summary.json", "snapshots/best.json", "profile.json")
    for name in (*places, "metrics.csv", "steps.csv"):
        NOT_JSON[spoil](run / name)
    assert main(["report", str(run)]) == ExitCode.DONE
    assert main(["export", str(run), str(run / "x.safetensors")]) == ExitCode.DONE
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("spoil", NOT_JSON)
def test_manifest_json(spoil: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = f"step-{newest_step(run):012d}"
    NOT_JSON[spoil](run / "snapshots" / newest / "manifest.json")
    code = main(["export", str(run), str(run / "x.pt")])
    said = capsys.readouterr().err
    assert code in (ExitCode.JOB, ExitCode.USAGE)  # 2 where it is no snapshot any more
    assert said.startswith("paceline: ")
    assert "Traceback" not in said


@pytest.mark.parametrize("spoil", ["a pipe", "not UTF-8"])
def test_hostfile(spoil: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    NOT_JSON[spoil](tmp_path / "hosts")
    assert "hosts" in _refused(capsys, "train", "digits", "--hostfile", tmp_path / "hosts")


@pytest.mark.slow
def test_strays_among_the_snapshots_dont_keep_a_training_from_going_on(
    paceline: Paceline, run: Path
) -> None:
    done, snapshots = newest_step(run), run / "snapshots"
    (snapshots / ".tmp-x").write_text("x")
    (snapshots / ".trash-x").symlink_to(run / "logs")
    (snapshots / ".replaced-x").symlink_to("nowhere")
    (snapshots / "step-999999999999").mkdir()
    (snapshots / "step-999999999998").write_text("x")
    (snapshots / "step-999999999997").symlink_to("nowhere")
    (snapshots / "step-999999999996").symlink_to(f"step-{done:012d}")
    ended = paceline.run("export", run, run / "last.pt", "--snapshot", "last")
    assert ended.code in (ExitCode.DONE, ExitCode.JOB), ended.err
    ended = paceline.run("resume", run, "--epochs", "2", "--allow-change", "epochs")
    assert ended.code == ExitCode.DONE, ended.err
    assert "Traceback" not in ended.err
    assert summary(run)["steps"] == 2 * done
    assert newest_step(run) == 2 * done
    assert not [path for path in snapshots.iterdir() if path.name.startswith(".")]
    assert (run / "logs").is_dir()


@pytest.mark.parametrize("spoil", ["a pipe", "not UTF-8"])
def test_a_table_that_is_none_is_named_or_begun_again(
    spoil: str, paceline: Paceline, run: Path
) -> None:
    NOT_JSON[spoil](run / "metrics.csv")
    ended = paceline.run("resume", run, "--epochs", "2", "--allow-change", "epochs")
    assert "Traceback" not in ended.err
    if spoil == "a pipe":
        assert ended.code == ExitCode.USAGE
        assert "metrics.csv can't be read: it is a" in ended.err
    else:
        assert ended.code == ExitCode.DONE, ended.err
