"""`paceline scale`: one real study of digits, interrupted and gone on with; and wrong usage."""

import json
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.commands import scale
from paceline.cli.scale_options import ScaleRequest, read
from paceline.errors import ExitCode, UsageError
from tests.cli.conftest import Paceline, wait_until
from tests.script.scripts import RUN, write_script

STUDY = ("scale", "digits", "--workers", "2", "--repeats", "1", "--seconds", "1", "--threads", "1")


def study_of(place: Path) -> Mapping[str, Any]:
    content: Mapping[str, Any] = json.loads((place / "study.json").read_text())
    return content


@pytest.mark.ranks
@pytest.mark.slow
def test_a_study_is_interrupted_and_gone_on_with(paceline: Paceline, tmp_path: Path) -> None:
    place = tmp_path / "study"
    process = paceline.start(*STUDY, "--study-dir", "study")
    wait_until((place / "runs" / "2-allreduce-1" / "run.json").exists, "two workers began")
    process.send_signal(signal.SIGINT)
    stopped = paceline.finish(process)
    assert stopped.code == ExitCode.RESUMABLE, stopped.err
    assert "Resume with what is missing: paceline scale digits" in stopped.out
    one, two = study_of(place)["sizes"]
    assert (one["efficiency"]["median"], two["images_per_s"]) == (1.0, None)
    done = paceline.run(*STUDY, "--study-dir", "study")
    assert done.code == ExitCode.DONE, done.out + done.err
    assert "1 of 2 measurements are there already" in done.out
    assert done.out.count("images/s, ") == 1
    study = study_of(place)
    assert study["sizes"][0] == one
    two = study["sizes"][1]
    assert (two["workers"], two["nodes"], two["global_batch"]) == (2, 1, 128)
    assert two["steps_per_epoch"] == 12
    rate = two["images_per_s"]["median"]
    assert two["efficiency"]["median"] == pytest.approx(rate / (2 * study["baseline_images_per_s"]))
    assert sum(two["parts"].values()) == pytest.approx(two["step_s"]["median"], rel=0.02)
    assert two["wire_bytes_per_step"] > 0
    assert "efficiency" in done.out
    assert (place / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert len((place / "study.csv").read_text().splitlines()) == 3
    assert not list(place.glob("runs/*/snapshots"))
    assert (place / "runs" / "2-allreduce-1" / "profile.json").exists()


def test_two_studies_of_one_second_have_directories_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = read(("digits", "--workers", "1"))
    places = []

    def note_place(request: ScaleRequest) -> int:
        assert request.commands.hostfiles == request.place.path / "hosts"
        places.append(request.place.path.name)
        return ExitCode.DONE

    monkeypatch.setattr(scale, "_scale", note_place)
    assert [scale._in_its_directory(asked) for _ in range(2)] == [ExitCode.DONE] * 2
    name = asked.place.path.name
    assert places == [name, f"{name}-2"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "what to measure is missing"),
        (("nowhere.py",), "there is no file nowhere.py"),
        (("digit",), "unknown recipe 'digit'"),
        (("digits", "--workers", "1,x"), "not numbers of workers: '1,x'"),
        (("digits", "--sync", "powersgd"), "say --methods"),
        (
            ("digits", "--powersgd-rank", "4"),
            "--powersgd-rank has no effect with --methods allreduce",
        ),
        (("digits", "--epochs", "3"), "--epochs has no effect without --train"),
        (("digits", "--global-batch", "64"), "--global-batch is for --mode strong"),
        (("digits", "--mode", "strong", "--batch-per-worker", "8"), "is for --mode weak"),
        (("digits", "--mode", "strong", "--workers", "100"), "more than the 64 samples"),
        (("digits", "--methods", "ordered", "--workers", "4"), "--shards"),
        (("digits", "--hosts", "a", "--workers", "2"), "a: say how many workers it takes"),
        (("digits", "--hosts", "a:1", "--workers", "2"), "and the hosts take 1"),
        (("digits", "--sync-code"), "--sync-code has no effect without --hosts"),
        (("digits", "--", "mine"), "arguments after -- are for a script"),
        (("digits", "--min-hosts", "1"), "unknown option '--min-hosts'"),
    ],
)
@pytest.mark.core_cases(5)
def test_wrong_usage(words: tuple[str, ...], message: str, refusal: Callable[..., str]) -> None:
    assert message in refusal("scale", *words)


def test_the_commands_of_a_recipe(tmp_path: Path) -> None:
    asked = read(
        (
            *STUDY[1:],
            *(
                "--methods",
                "allreduce,powersgd",
                "--powersgd-rank",
                "2",
                "--train",
                "--epochs",
                "3",
            ),
            *("--study-dir", str(tmp_path)),
        )
    )
    assert asked is not None
    assert [each.name for each in asked.sizes] == ["1-allreduce", "2-allreduce", "2-powersgd"]
    assert asked.batch == 64
    words = asked.commands.measure(asked.sizes[2], tmp_path / "run", 128)
    text = " ".join(words)
    assert text.startswith(f"train digits --run-dir {tmp_path / 'run'} --workers 2 --on local")
    assert "--epochs 1000000 --target-accuracy none" in text
    assert "--time-budget 1.0 --max-restarts 0 --global-batch 128" in text
    assert text.endswith("--sync powersgd --powersgd-rank 2 --sync-warmup-steps 2")
    text = " ".join(asked.commands.train(asked.sizes[2], tmp_path / "run", 128))
    assert "--epochs 3" in text
    assert "--time-budget" not in text
    assert "--sync-warmup-steps" not in text
    assert "--powersgd-rank" not in asked.commands.measure(asked.sizes[1], tmp_path / "run", 128)


def test_the_commands_of_a_script_on_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_script(tmp_path, run=RUN)
    given = ("--batch-per-worker", "8", "--hosts", "a:2,u@b:1", "--host-keys", "accept-new")
    asked = read(("own.py", *given, "--study-dir", "s", "--", "--batch", "{global_batch}"))
    assert asked is not None
    assert [(each.workers, each.nodes) for each in asked.sizes] == [(1, 1), (2, 1), (3, 2)]
    (tmp_path / "s").mkdir()
    words = list(asked.commands.measure(asked.sizes[2], Path("run"), 24))
    hostfile = tmp_path / "s" / "hosts" / "3.txt"
    where = ["--hostfile", str(hostfile), "--min-hosts", "2", "--host-keys", "accept-new"]
    assert words[:4] == ["run", "own.py", "--run-dir", "run"]
    assert words[4:10] == where
    assert words[10:] == ["--time-budget", "20.0", "--max-restarts", "0", "--", "--batch", "24"]
    assert hostfile.read_text() == "a slots=2\nb slots=1 user=u\n"
    assert asked.commands.resume(asked.sizes[0], Path("run"))[:2] == ["resume", "run"]


def test_a_place_for_the_batch_needs_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_script(tmp_path, run=RUN)
    with pytest.raises(UsageError, match="needs --batch-per-worker"):
        read(("own.py", "--", "{global_batch}"))
