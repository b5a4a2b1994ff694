"""`paceline tune`: one real tuning of digits, interrupted and gone on with; and wrong usage."""

import json
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.commands.tune import _as_text, _end, _read, _tuner, main
from paceline.errors import ExitCode, UsageError
from paceline.scaling.tuning import Change, Gain, Kind, Tried
from tests.cli.conftest import Paceline, wait_until
from tests.script.scripts import RUN, write_script

SETTLED = "--threads 1 --no-compile --max-batch-per-worker 32 --precision fp32 --loader-workers 0"
TUNE = ("tune", "digits", "--workers", "2", *SETTLED.split(), "--seconds", "1")


def change(**settings: int) -> Change:
    return Change(name="changed", settings=settings, kind="rounding")


def found(place: Path) -> Mapping[str, Any]:
    content: Mapping[str, Any] = json.loads((place / "tune.json").read_text())
    return content


@pytest.mark.ranks
@pytest.mark.slow
def test_a_tuning_is_interrupted_and_gone_on_with(paceline: Paceline, tmp_path: Path) -> None:
    place = tmp_path / "tuning"
    # However slow the machine is, there is time for a pair; what is measured already takes none.
    process = paceline.start(*TUNE, "--tune-dir", "tuning", "--budget", "1h")
    wait_until((place / "measured" / "contiguous-1.json").exists, "a pair began", process)
    process.send_signal(signal.SIGINT)
    stopped = paceline.finish(process)
    assert stopped.code == ExitCode.RESUMABLE, stopped.err
    assert "Resume with what is missing: paceline tune digits" in stopped.out
    first = (place / "measured" / "first-0.json").read_text()
    done = paceline.run(*TUNE, "--tune-dir", "tuning", "--budget", "60s")
    assert done.code == ExitCode.DONE, done.out + done.err
    assert (place / "measured" / "first-0.json").read_text() == first
    (tried,) = found(place)["tried"]
    confirmed = found(place)["confirmed"]
    assert tried["settings"] == {"memory_format": "contiguous"}
    assert len(tried["ratios"]) >= 1
    assert "--memory-format contiguous" in done.out
    written = tmp_path / "tuned.toml"
    is_faster = confirmed is not None and confirmed["verdict"] == "faster"
    assert written.exists() == is_faster
    if is_faster:
        assert 'memory-format = "contiguous"' in written.read_text()
        checked = paceline.run("train", "digits", "--config", "tuned.toml", "--dry-run")
        assert checked.code == ExitCode.DONE, checked.err
    assert not list(place.glob("runs/*/snapshots"))
    other = paceline.run(*TUNE, "--tune-dir", "tuning", "--seed", "1")
    assert other.code == ExitCode.USAGE
    assert "is of another tuning: --seed was None and is 1 now" in other.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "what to tune is missing"),
        (("nowhere.py",), "there is no file nowhere.py"),
        (("digits", "--budget", "soon"), "--budget is 'soon', not a duration"),
        (("digits", "--seconds", "0.1"), "--seconds must be at least 1, not 0.1"),
        (("digits", "--epochs", "3"), "--epochs has no effect without --check-quality"),
        (("digits", "--", "mine"), "arguments after -- are for a script"),
        (("digits", "--sync", "local"), "unknown option '--sync'"),
        (("digits", "--workers", "100", "--global-batch", "64"), "100"),
        (
            ("digits", "--output", "missing/tuned.toml"),
            "there is no directory for it",
        ),
        (("digits", "--output", "/dev"), "--output /dev is a directory"),
    ],
)
@pytest.mark.core_cases(5)
def test_wrong_usage(words: tuple[str, ...], message: str, refusal: Callable[..., str]) -> None:
    assert message in refusal("tune", *words)


def test_a_file_of_somebody_else_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tuned.toml").write_text("lr = 0.1\n")
    with pytest.raises(UsageError, match=r"tuned\.toml is there already, and not of paceline tune"):
        _read(("digits",))
    (tmp_path / "tuned.toml").write_text("# By paceline tune: digits is 1.1 times as fast\n")
    assert _read(("digits",)).options.output == "tuned.toml"


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    with pytest.raises(UsageError, match="holds something else"):
        main(("digits", "--tune-dir", str(tmp_path)))
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("words", "batch"),
    [
        ((), 64),
        (("--batch-per-worker", "24"), 48),
        (("--global-batch", "96"), 96),
        (("--workers", "1", "--batch-per-worker", "24"), 24),
    ],
)
def test_the_commands_of_a_recipe_have_its_global_batch(
    words: tuple[str, ...], batch: int, tmp_path: Path
) -> None:
    workers = () if "--workers" in words else ("--workers", "2")
    tuner = _tuner(_read(("digits", "--lr", "0.2", *workers, *words)))
    assert tuner.training.batch == batch
    size, given = tuner._as_changed(change(workers=4, compile=True))
    text = " ".join(
        tuner.training.commands(given, 5.0).measure(size, tmp_path / "run", tuner.training.batch)
    )
    assert text.startswith(f"train digits --run-dir {tmp_path / 'run'} --workers 4 --on local")
    assert f"--global-batch {batch}" in text
    assert "--lr 0.2 --compile" in text
    assert "--time-budget 5.0 --max-restarts 0" in text
    assert "--batch-per-worker" not in text


def test_the_commands_of_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_script(tmp_path, run=RUN)
    tuner = _tuner(_read(("own.py", "--workers", "2", "--", "--hidden", "8")))
    assert tuner.training.batch is None
    size, given = tuner._as_changed(change(compile=True))
    words = list(tuner.training.commands(given, 5.0).measure(size, Path("run"), None))
    assert words[:6] == ["run", "own.py", "--run-dir", "run", "--workers", "2"]
    assert words[-3:] == ["--", "--hidden", "8"]
    assert "--compile" in words
    assert "--progress" not in words


def test_over_hosts_cheaper_ways_of_combining_gradients_are_tried(tmp_path: Path) -> None:
    place = str(tmp_path / "t")
    asked = _read(("digits", "--hosts", "a:2,b:1", "--sync-code", "--tune-dir", place))
    tuner = _tuner(asked)
    assert (tuner.training.size.workers, tuner.training.size.nodes) == (3, 2)
    assert "sync" in tuner.training.known
    (tmp_path / "t").mkdir()
    size, given = tuner._as_changed(Change(name="s", settings={"sync": "powersgd"}, kind="quality"))
    text = " ".join(tuner.training.commands(given, 5.0).measure(size, Path("run"), 64))
    assert f"--hostfile {tmp_path}/t/hosts/3.txt --min-hosts 2 --sync-code" in text
    assert "--sync powersgd --sync-warmup-steps 2" in text  # within a trial it begins at once
    usual = " ".join(tuner.training.commands({}, 5.0).measure(tuner.training.size, Path("run"), 64))
    assert "--sync " not in usual


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--hosts", "a", "--global-batch", "64"), "a: say how many workers it takes"),
        (("--hosts", "a:1", "--workers", "2"), "--workers is for this machine"),
        (("--sync-code",), "--sync-code has no effect without --hosts"),
    ],
)
def test_wrong_hosts(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _tuner(_read(("digits", *words)))


@pytest.mark.parametrize("starts", [(), (60.0,)])
def test_the_table_fits_a_terminal(
    starts: tuple[float, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuner = _tuner(replace(_read(("digits",)), place=tmp_path))
    gain = Gain(ratios=(1.5, 1.6, 1.5), starting_s=starts)
    half = Change(
        name="half",
        settings={"workers": 2, "threads": 1, "max_batch_per_worker": 16, "precision": "bf16"},
        kind="quality",
    )
    tried = Tried(change=half, gain=gain)
    tuner.tried, tuner.confirmed = [tried], tried
    assert max(map(len, _as_text(tuner).splitlines())) > 120  # a file has whole lines
    monkeypatch.setattr("paceline.cli.commands.tune.line_width", lambda most: min(80, most))
    lines = _as_text(tuner).splitlines()
    assert max(map(len, lines)) <= 80, lines
    assert ("pays" in lines[0]) == bool(starts)
    assert "--max-batch-per-worker" in "\n".join(lines)


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("quality", "say whether that is as good: paceline tune digits --check-quality --tune-dir"),
        ("rounding", "Nothing that was tried is sure to make digits faster"),
    ],
)
def test_what_is_faster_but_unjudged_is_said(
    kind: Kind, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = replace(_read(("digits",)), place=tmp_path)
    tuner = _tuner(asked)
    speeds = (1.5, 1.5, 1.5) if kind == "quality" else (0.8,)
    change = Change(name="changed", settings={"precision": "bf16"}, kind=kind)
    tuner.tried = [Tried(change=change, gain=Gain(ratios=speeds))]
    assert _end(asked, tuner) == ExitCode.DONE
    assert line in capsys.readouterr().out


def test_a_budget_for_no_change_is_said_to_be_too_short(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change = Change(name="changed", settings={"precision": "bf16"}, kind="quality")
    for budget, told in (("10s", "--budget is too short: three trials"), ("1h", "With as much")):
        asked = replace(_read(("digits", "--budget", budget)), place=tmp_path)
        tuner = _tuner(asked)
        tuner.tried = [Tried(change=change)]
        assert _end(asked, tuner) == ExitCode.DONE
        assert told in capsys.readouterr().out


def test_a_tuning_that_was_stopped_at_once_shows_no_table(tmp_path: Path) -> None:
    assert _as_text(_tuner(replace(_read(("digits",)), place=tmp_path))) == "Nothing was tried yet."
