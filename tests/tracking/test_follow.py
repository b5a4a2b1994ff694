"""What is delivered, with a sink that fails as it is told."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

import pytest

from paceline.errors import UsageError
from paceline.tracking import follow, registry
from paceline.tracking.base import Ending, Opened, Row, RunInfo, Sink
from paceline.tracking.follow import Follower, TrackerNote, without_secrets
from paceline.tracking.registry import SinkEntry, require_trackers
from paceline.tracking.rows import Cursor
from tests.tracking.runs import begun, ended, epoch, step, truncate


class Server:
    """What a tracker has."""

    def __init__(self) -> None:
        self.opened: list[str | None] = []
        self.steps: list[int] = []
        self.batches: list[int] = []
        self.endings: list[str] = []
        self.fails: set[str] = set()
        self.has_until: int | None = None
        self.kept_in = ""


SERVER = Server()


@final
class ToldSink(Sink):
    def open(self, run: RunInfo, previous: str | None) -> Opened:
        SERVER.opened.append(previous)
        self._fail("open")
        SERVER.kept_in = run.kept_in or SERVER.kept_in
        return Opened(
            id="r1",
            where="https://x.example/r1",
            kept_in=SERVER.kept_in,
            last_step=SERVER.has_until,
        )

    def log(self, rows: Sequence[Row]) -> None:
        self._fail("log")
        SERVER.steps += [row.step for row in rows]
        SERVER.batches.append(len(rows))

    def finish(self, ending: Ending, summary: Mapping[str, float]) -> None:
        self._fail("finish")
        SERVER.endings.append(ending)

    def close(self) -> None:
        self._fail("close")

    def _fail(self, method: str) -> None:
        if method in SERVER.fails:
            raise ConnectionError(f"no {method}: https://me:hunter22@x.example.\nmore of it")


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "_FIRST_RETRY_S", 0.0)
    monkeypatch.setattr(follow, "EVERY_S", 0.0)
    monkeypatch.setattr(follow, "trackers", lambda: {"told": SinkEntry(sink="")})
    monkeypatch.setattr(SinkEntry, "make", lambda self: ToldSink())
    SERVER.__init__()  # type: ignore[misc]


def test_a_resumed_run_goes_on_as_the_same_and_logs_no_step_twice(tmp_path: Path) -> None:
    run, said = begun(tmp_path), list[str]()
    first = Follower(run, "told", None, said.append)
    step(run, 2, 0.9)
    assert not first.deliver(is_over=False)
    step(run, 4, 0.8)
    epoch(run, 1, 0.85)
    assert first.deliver(is_over=True)
    assert (SERVER.opened, SERVER.steps, SERVER.endings) == ([None], [2, 4, 4], ["stopped"])
    note = TrackerNote.read(run, "told")
    assert note is not None
    assert (note.id, note.cursor, note.is_complete) == ("r1", Cursor(step=4, epoch=1), True)
    assert said == ["told: https://x.example/r1"]
    # From the snapshot of step 2.
    truncate(run, epochs=0, steps=1)
    second = Follower(run, "told", None, said.append)
    for number in (4, 6):
        step(run, number, 0.1)
    epoch(run, 1, 0.2)
    ended(run)
    assert second.deliver(is_over=True)
    assert SERVER.opened == [None, "r1"]
    assert SERVER.steps == [2, 4, 4, 6]
    assert SERVER.endings == ["stopped", "finished"]


@pytest.mark.parametrize("fails", [{"open"}, {"log"}, {"finish"}, {"log", "close"}])
def test_what_fails_is_tried_again_and_nothing_is_lost(tmp_path: Path, fails: set[str]) -> None:
    run, said = begun(tmp_path), list[str]()
    follower = Follower(run, "told", None, said.append)
    SERVER.fails = fails
    step(run, 2, 0.9)
    ended(run)
    assert not follower.deliver(is_over=True)
    step(run, 3, 0.8)
    assert not follower.deliver(is_over=True)
    SERVER.fails = set()
    assert follower.deliver(is_over=True)
    assert SERVER.steps == [2, 3]
    assert SERVER.endings == ["finished"]
    assert len(said) == 1  # the training's screen isn't filled


def test_the_first_failure_is_told_without_secrets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, said = begun(tmp_path), list[str]()
    SERVER.fails = {"open"}
    assert not Follower(run, "told", None, said.append).deliver(is_over=False)
    (line,) = said
    assert line.startswith("told: no open: https://***@x.example. It is tried again while")
    assert str(run.tracker_log) in line
    assert "hunter22" not in capsys.readouterr().err
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    assert without_secrets("key 0123456789abcdef!") == "key ***!"


def test_a_tracker_that_has_less_than_was_sent_is_sent_the_rest(tmp_path: Path) -> None:
    run = begun(tmp_path)
    for number in (2, 4, 6):
        step(run, number, 0.9)
    TrackerNote(id="r1", where="", cursor=Cursor(step=6)).write(run, "told")
    SERVER.has_until = 4
    assert Follower(run, "told", None, lambda _: None).deliver(is_over=True)
    assert SERVER.steps == [6]


def test_a_damaged_note_begins_a_new_run(tmp_path: Path) -> None:
    run = begun(tmp_path)
    run.tracker_json("told").write_text('{"id": 3')
    step(run, 2, 0.9)
    assert Follower(run, "told", None, lambda _: None).deliver(is_over=True)
    assert (SERVER.opened, SERVER.steps) == ([None], [2])


def test_a_long_run_is_sent_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "_BATCH", 2)
    run = begun(tmp_path)
    for number in range(1, 6):
        step(run, number, 0.9)
    assert Follower(run, "told", None, lambda _: None).deliver(is_over=True)
    assert SERVER.steps == [1, 2, 3, 4, 5]
    assert SERVER.batches == [2, 2, 1]


def test_nothing_is_sent_of_what_was_never_trained(tmp_path: Path) -> None:
    run = begun(tmp_path)
    run.run_json.unlink()
    follower = Follower(run, "told", None, lambda _: None)
    assert follow.follow(follower, run, lambda: True)
    assert SERVER.opened == []


def test_a_tracker_that_was_never_reached_is_tried_once_at_the_end(tmp_path: Path) -> None:
    run, said = begun(tmp_path), list[str]()
    SERVER.fails = {"open"}
    looks = iter([False, True])
    follower = Follower(run, "told", None, said.append)
    assert not follow.follow(follower, run, lambda: next(looks))
    assert len(SERVER.opened) == 2
    # One that had begun its run is tried again and again.
    SERVER.fails = {"log"}
    step(run, 2, 0.9)
    looks = iter([False, True, True, True])

    def is_over() -> bool:
        over = next(looks)
        if len(SERVER.opened) == 5:
            SERVER.fails = set()
        return over

    follower = Follower(run, "told", None, said.append)
    assert follow.follow(follower, run, is_over)
    assert SERVER.steps == [2]


def test_a_run_that_the_tracker_began_anew_is_sent_whole(tmp_path: Path) -> None:
    run = begun(tmp_path)
    for number in (2, 4):
        step(run, number, 0.9)
    TrackerNote(id="gone", where="", cursor=Cursor(step=4), kept_in="/store").write(run, "told")
    assert Follower(run, "told", None, lambda _: None).deliver(is_over=True)
    assert SERVER.opened == ["gone"]
    assert SERVER.kept_in == "/store"
    assert SERVER.steps == [2, 4]


@pytest.mark.parametrize(("kept_in", "noted"), [("/store", "/store"), ("http://me:pw@x", "")])
def test_where_the_run_is_kept_is_noted_without_secrets(
    kept_in: str, noted: str, tmp_path: Path
) -> None:
    run = begun(tmp_path)
    SERVER.kept_in = kept_in
    assert Follower(run, "told", None, lambda _: None).deliver(is_over=True)
    note = TrackerNote.read(run, "told")
    assert note is not None
    assert note.kept_in == noted


def test_an_unknown_tracker_and_a_missing_package_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UsageError, match=r"unknown tracker 'wandbb'\. Did you mean 'wandb'"):
        require_trackers(["wandbb"])
    with pytest.raises(UsageError, match=r"TensorBoard has its own option: --tensorboard"):
        require_trackers(["tensorboard"])
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"--tracker mlflow .* pip install 'paceline\[mlflow\]'"):
        require_trackers(["mlflow"])
    require_trackers([])
