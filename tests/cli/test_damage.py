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
    "empty": _of(b""),
    "text": _of(b"hello\n"),
    "a list": _of(b"[]"),
    "null": _of(b"null"),
    "a number": _of(b"7"),
    "not UTF-8": _of(b'{"format": "\xff\xfe"}'),
    "deep": _of(b"[" * 200_000),
    "deep objects": _of(b'{"format":' * 50_000),
    "a huge number": _of(b'{"format": 1' + b"0" * 5000 + b"}"),
    "a huge exponent": _of(b'{"format": 1e999}'),
    "NaN": _of(b'{"format": NaN}'),
    "twice": _of(b'{"format": 1, "format": 1}'),
    "5 MB": _of(b"[" + b"1," * 2_500_000 + b"1]"),
    "beyond any size": _of(b" " * (17 << 20)),
    "zero bytes": _of(b"\0" * 1000),
    "a pipe": _pipe,
    "a device": _zeros,
    "a directory": _directory,
}
WRONG_RUN: dict[str, Spoil] = {
    "format 99": _changed(format=99),
    "format as text": _changed(format="1"),
    "kind": _changed(kind=["recipe"]),
    "no settings": _changed(settings=None),
    "settings as a list": _changed(settings=[1]),
    "a setting of another type": _changed(settings={"epochs": "many"}),
    "an unknown setting": _changed(settings={"moons": 3}),
    "a nested setting": _changed(settings={"epochs": {"a": []}}),
    "derived as text": _changed(derived="x"),
    "a world of text": _changed(derived={"world_size": "two", "global_batch": 64}),
    "a world of none": _changed(derived={"world_size": 0, "global_batch": 64}),
    "a batch as a list": _changed(derived={"world_size": 1, "global_batch": [64]}),
    "given of numbers": _changed(given=[1, 2]),
    "arguments as text": _changed(recipe_arguments="x"),
    "an argument that is an object": _changed(recipe_arguments={"data_dir": {"a": 1}}),
    "an unknown argument": _changed(recipe_arguments={"moons": 1}),
    "a recipe of none": _changed(reference=None),
    "a recipe that is none": _changed(reference="\x1b]0;owned\x07"),
    "hosts of numbers": _changed(hosts=[1]),
    "history as text": _changed(history="x"),
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


def _unreadable(path: Path) -> None:
    """As for another user: root reads every file, so there a directory stands for it."""
    path.write_text("{}")
    path.chmod(0)
    if os.access(path, os.R_OK):
        _directory(path)


FOREIGN: dict[str, Spoil] = {
    "an empty object": _of(b"{}"),
    "of something else": _of(b'{"name": "web", "command": ["npm"]}'),
    "binary": _of(b"\x7fELF\0\xff" * 100),
    "unreadable": _unreadable,
    **{name: NOT_JSON[name] for name in ("empty", "text", "a list", "a directory")},
}
_READERS = (
    "report",
    "report --html page.html",
    "report --watch",
    "watch",
    "watch --json",
    "compare",
    "evaluate",
    "export x.pt",
    "resume",
    "label --name a",
    "copy elsewhere",
    "track",
    "workers --once",
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


def test_a_directory_whose_run_json_is_something_elses_is_no_run_of_a_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/mine").mkdir(parents=True)
    Path("runs/mine/run.json").write_text("{}")
    assert main(["runs", "--json"]) == ExitCode.DONE
    assert "mine" not in capsys.readouterr().out
    assert "no training" in _refused(capsys, "compare", "runs")


@pytest.mark.parametrize("spoil", NOT_JSON)
@pytest.mark.core_cases(10)
def test_profile_json(spoil: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    NOT_JSON[spoil](run / "profile.json")
    assert "profile.json" in _refused(capsys, "predict", run, "--link", "25gbit")


@pytest.mark.parametrize(
    "spoil",
    [
        _changed(format=99),
        _changed(world_size="2"),
        _changed(world_size=0),
        _changed(workers={}),
        _changed(workers=[1]),
        _changed(gradients=[{"at_s": "x", "bytes": 1}]),
        _changed(step_s={"median": 0, "low": 0, "high": 0}),
        _changed(step_s=1.0),
        _changed(parts={}),
        _changed(epoch=None),
    ],
)
def test_a_profile_of_wrong_types(
    spoil: Spoil, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(run / "profile.json")
    assert "profile.json" in _refused(capsys, "predict", run, "--link", "25gbit")


@pytest.mark.parametrize("spoil", NOT_JSON)
@pytest.mark.core_cases(8)
def test_study_json(spoil: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "study").mkdir()
    NOT_JSON[spoil](tmp_path / "study" / "study.json")
    _refused(capsys, "predict", tmp_path / "study", "--link", "25gbit")


@pytest.mark.parametrize("spoil", NOT_JSON)
@pytest.mark.core_cases(4)
def test_files_without_which_a_command_goes_on(
    spoil: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = ("summary.json", "snapshots/best.json", "logs/workers.json", "profile.json")
    for name in (*places, "metrics.csv", "steps.csv"):
        NOT_JSON[spoil](run / name)
    assert main(["report", str(run)]) == ExitCode.DONE
    assert main(["watch", str(run)]) == ExitCode.DONE
    assert main(["workers", str(run), "--once"]) == ExitCode.DONE
    assert main(["export", str(run), str(run / "x.safetensors")]) == ExitCode.DONE
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("spoil", NOT_JSON)
@pytest.mark.core_cases(9)
def test_manifest_json(spoil: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = f"step-{newest_step(run):012d}"
    NOT_JSON[spoil](run / "snapshots" / newest / "manifest.json")
    code = main(["export", str(run), str(run / "x.pt")])
    said = capsys.readouterr().err
    assert code in (ExitCode.JOB, ExitCode.USAGE)  # 2 where it is no snapshot any more
    assert said.startswith("paceline: ")
    assert "Traceback" not in said


@pytest.mark.parametrize("spoil", ["a pipe", "a device", "a directory", "not UTF-8", "5 MB"])
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


@pytest.mark.parametrize("spoil", ["a pipe", "a device", "5 MB", "not UTF-8", "zero bytes"])
@pytest.mark.core_cases(2)
def test_a_table_that_is_none_is_named_or_begun_again(
    spoil: str, paceline: Paceline, run: Path
) -> None:
    NOT_JSON[spoil](run / "metrics.csv")
    ended = paceline.run("resume", run, "--epochs", "2", "--allow-change", "epochs")
    assert "Traceback" not in ended.err
    if spoil in ("a pipe", "a device"):
        assert ended.code == ExitCode.USAGE
        assert "metrics.csv can't be read: it is a" in ended.err
    else:
        assert ended.code == ExitCode.DONE, ended.err
