"""`paceline pack` through the command line."""

import os
import signal
from pathlib import Path

import pytest

from paceline.cli.app import main
from paceline.cli.commands.pack import _progress
from paceline.data.options import PackOptions
from paceline.data.packed import load_packed
from paceline.errors import ExitCode
from tests.cli.conftest import Paceline, summary, wait_until
from tests.support.image_files import truncate, write_image_folder


def test_packs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_image_folder(tmp_path / "images")
    command = ["pack", str(tmp_path / "images"), str(tmp_path / "out"), "--size", "32"]
    assert main([*command, "--jobs", "1"]) == ExitCode.DONE
    assert capsys.readouterr().out == (
        f"{tmp_path}/out: 24 train, 12 val images of 32x32 in 3 classes, 0.00 GB\n"
    )
    assert load_packed(tmp_path / "out")["train"].images.shape == (24, 3, 32, 32)


def test_broken_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_image_folder(tmp_path / "images")
    truncate(tmp_path / "images" / "train" / "ant" / "000.jpg")
    command = ["pack", str(tmp_path / "images"), str(tmp_path / "out"), "--jobs", "1"]
    assert main(command) == ExitCode.JOB
    assert "1 image is broken:" in capsys.readouterr().err
    assert main([*command, "--on-broken", "skip"]) == ExitCode.DONE
    out = capsys.readouterr().out
    assert "ant/000.jpg: image file is truncated" in out
    assert out.endswith("; 1 broken ones left out\n")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("pack", "the image folder is missing. Usage: paceline pack DIR OUT"),
        ("pack images", "the directory to make is missing"),
        ("pack images out --size 0", "size is 0: it must be at least 1"),
        ("pack images out --on-broken ignore", "ignore"),
    ],
)
def test_wrong_usage(
    line: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(line.split()) == ExitCode.USAGE
    assert message in capsys.readouterr().err


def test_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pack", str(tmp_path / "nowhere"), str(tmp_path / "out")]) == ExitCode.JOB
    assert "there is no such directory" in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_and_again(paceline: Paceline) -> None:
    """Ctrl-C reaches the whole process group, as from a terminal."""
    images = write_image_folder(paceline.directory / "images", {"train": 20, "val": 2}, side=320)
    command = ("pack", images, "out", "--size", "1000", "--jobs", "2")
    process = paceline.start(*command)
    journal = paceline.directory / ".out.partial" / "journal.jsonl"
    wait_until(lambda: journal.exists() and journal.read_bytes().count(b"\n") > 1, "a block")
    os.killpg(process.pid, signal.SIGINT)
    assert paceline.finish(process).code in (ExitCode.RESUMABLE, ExitCode.DONE)
    done = paceline.run(*command)
    assert done.code == ExitCode.DONE, done.err
    assert "60 train, 6 val images of 1000x1000" in done.out


_RECIPE = """
from pathlib import Path

from torch import nn

from paceline import Job, recipe
from paceline.data.augment import RandomFlip, RandomShift
from paceline.data.imagefolder import load_image_folder
from paceline.data.packed import load_packed


@recipe(epochs=2, global_batch=7, optimizer="adam", lr=0.01)
def build(*, packed: bool = True) -> Job:
    "Digits in colour, from a folder or packed."
    splits = load_packed(Path("out")) if packed else load_image_folder(Path("images"), 32)
    layers = nn.Conv2d(3, 8, 5, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()
    return Job(
        model=nn.Sequential(*layers, nn.Linear(128, 3)),
        train=splits["train"],
        validation=splits["val"],
        num_classes=3,
        augment=(RandomShift(3), RandomFlip()),
    )
"""


@pytest.mark.slow
def test_training_is_the_same_on_the_folder_and_packed(paceline: Paceline) -> None:
    write_image_folder(paceline.directory / "images")
    (paceline.directory / "mine.py").write_text(_RECIPE)
    assert paceline.run("pack", "images", "out", "--size", "32").code == ExitCode.DONE
    hashes = set()
    for form in ("--packed", "--no-packed"):
        done = paceline.run(
            "train", "mine.py:build", form, "--on", "here", "--run-dir", f"run{form}"
        )
        assert done.code == ExitCode.DONE, done.err
        hashes.add(summary(paceline.directory / f"run{form}")["weights_sha256"])
    assert len(hashes) == 1


def test_progress_is_told_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter([0.0, 0.0, 4.0, 10.0, 11.0, 20.0])
    tell = _progress(lambda: next(times))
    for done in (100, 300, 1100, 1200, 2000):
        tell(done, 2000)
    assert capsys.readouterr().out == "1,100 of 2,000 images, 100 images/s\n"


def test_the_flags_are_the_options() -> None:
    """Scripts rely on names and defaults."""
    shown = [f"{name} {value!r}" for name, value in vars(PackOptions()).items()]
    assert shown == ["size 256", "jobs None", "on_broken 'error'", "verify True"]
