import errno
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

import paceline
from paceline.checkpoint.format import HostSnapshot, Snapshot, read_snapshot
from paceline.checkpoint.store import SnapshotStore
from paceline.checkpoint.writer import SnapshotWriter
from tests.launch.waiting import patient
from tests.support.needs import MEMORY_DISK, need

MakeSnapshot = Callable[..., Snapshot]
Same = Callable[[Snapshot, Snapshot], bool]


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "snapshots", keep_last=5)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def writer(store: SnapshotStore, said: list[str]) -> Iterator[SnapshotWriter]:
    with closing(SnapshotWriter(store, said.append)) as made:
        yield made


class Gate:
    """Holds the writer's thread inside a publish until it is opened."""

    def __init__(self, store: SnapshotStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()
        publish = store.publish

        def held(host: HostSnapshot, *, best: bool) -> Path:
            self.entered.set()
            assert self.opened.wait(patient(60))
            return publish(host, best=best)

        monkeypatch.setattr(store, "publish", held)


def writer_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("paceline-snapshots")]


def test_what_is_offered_is_published_as_it_was_then(
    writer: SnapshotWriter, store: SnapshotStore, said: list[str]
) -> None:
    weight = torch.zeros(1000)
    for step in (1, 2, 3):
        state = {"step": step}
        weight.fill_(step)
        offered = Snapshot(step=step, tensors={"model": {"w": weight}}, state=state)
        assert writer.offer(offered, best=step == 2, wait=True)
        weight.zero_()
        state["step"] = 0
    writer.flush()
    assert said == []
    for step in (1, 2, 3):
        snapshot = read_snapshot(store.path_of(step))
        assert torch.equal(snapshot.tensors["model"]["w"], torch.full((1000,), float(step)))
        assert snapshot.state == {"step": step}
    assert store.best() == store.path_of(2)
    assert (writer.written, writer.skipped) == (3, 0)


def test_one_offered_while_another_is_written_is_skipped_and_counted(
    writer: SnapshotWriter,
    store: SnapshotStore,
    make_snapshot: MakeSnapshot,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Gate(store, monkeypatch)
    assert writer.offer(make_snapshot(1))
    assert gate.entered.wait(patient(60))
    assert not writer.offer(make_snapshot(2))
    assert not writer.offer(make_snapshot(3))
    gate.opened.set()
    assert writer.offer(make_snapshot(4), wait=True)
    writer.flush()
    assert store.steps() == [1, 4]
    assert (writer.written, writer.skipped) == (2, 2)


def test_tensors_of_another_shape_get_memory_of_their_own(
    writer: SnapshotWriter, store: SnapshotStore, make_snapshot: MakeSnapshot, same: Same
) -> None:
    for step, size in ((1, 10), (2, 20), (3, 5)):
        writer.offer(make_snapshot(step, size=size), wait=True)
    writer.flush()
    for step, size in ((1, 10), (2, 20), (3, 5)):
        assert same(read_snapshot(store.path_of(step)), make_snapshot(step, size=size))


def test_no_thread_before_the_first_offer_and_none_after_close(
    store: SnapshotStore, make_snapshot: MakeSnapshot
) -> None:
    writer = SnapshotWriter(store, print)
    assert writer_threads() == []
    writer.offer(make_snapshot(1))
    assert len(writer_threads()) == 1
    writer.close()
    writer.close()
    assert writer_threads() == []
    assert store.steps() == [1]


def test_a_failed_write_is_said_and_the_next_one_works(
    writer: SnapshotWriter,
    store: SnapshotStore,
    said: list[str],
    make_snapshot: MakeSnapshot,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writer.offer(make_snapshot(1))
    writer.flush()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", raiser(OSError(errno.EROFS, "Read-only file system")))
        writer.offer(make_snapshot(2))
        writer.flush()
    message = (
        "the snapshot of step 2 could not be written: Read-only file system; "
        "training goes on, the newest good snapshot is step 1"
    )
    assert said == [message]
    assert [p.name for p in store.directory.iterdir()] == ["step-000000000001"]
    writer.offer(make_snapshot(3))
    writer.flush()
    assert said == [message]
    assert writer.written == 2


def test_the_first_write_failing_says_that_there_is_none(
    writer: SnapshotWriter, store: SnapshotStore, said: list[str], make_snapshot: MakeSnapshot
) -> None:
    store.directory.parent.joinpath("snapshots").write_text("a file in the way")
    writer.offer(make_snapshot(1))
    writer.flush()
    assert said[0].endswith("training goes on, there is none yet")


class Refusing:
    """A store whose disk is full for so many tries."""

    def __init__(
        self, store: SnapshotStore, monkeypatch: pytest.MonkeyPatch, times: int | None
    ) -> None:
        self.tries = 0
        publish = store.publish

        def refused(host: HostSnapshot, *, best: bool) -> Path:
            self.tries += 1
            if times is None or self.tries <= times:
                raise OSError(errno.ENOSPC, "No space left on device", "/there")
            return publish(host, best=best)

        monkeypatch.setattr(store, "publish", refused)


def test_the_last_snapshot_is_tried_again(
    writer: SnapshotWriter,
    store: SnapshotStore,
    said: list[str],
    make_snapshot: MakeSnapshot,
    monkeypatch: pytest.MonkeyPatch,
    same: Same,
) -> None:
    disk = Refusing(store, monkeypatch, times=3)
    writer.offer(make_snapshot(1), best=True)
    assert writer.save_last(60, lambda: False) == ""
    assert disk.tries == 4
    assert same(read_snapshot(store.path_of(1)), make_snapshot(1))
    assert store.best() == store.path_of(1)
    assert "trying again for 60 s" in said[-1]
    assert writer.written == 1


def test_what_a_later_snapshot_replaces_is_not_tried_again(
    writer: SnapshotWriter,
    store: SnapshotStore,
    make_snapshot: MakeSnapshot,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = Refusing(store, monkeypatch, times=1)
    writer.offer(make_snapshot(1))
    writer.offer(make_snapshot(2), wait=True)
    assert writer.save_last(60, lambda: False) == ""
    assert (disk.tries, store.steps()) == (2, [2])


@pytest.mark.parametrize(("limit_s", "cut_short", "tries"), [(0, False, 1), (60, True, 1)])
def test_a_last_snapshot_that_cannot_be_written_is_told(
    writer: SnapshotWriter,
    store: SnapshotStore,
    make_snapshot: MakeSnapshot,
    monkeypatch: pytest.MonkeyPatch,
    limit_s: float,
    cut_short: bool,
    tries: int,
) -> None:
    disk = Refusing(store, monkeypatch, times=None)
    writer.offer(make_snapshot(1))
    reason = writer.save_last(limit_s, lambda: cut_short)
    assert "the snapshot of step 1 could not be written: No space left on device" in reason
    assert disk.tries == tries


def test_a_last_snapshot_is_tried_until_the_time_is_over(
    writer: SnapshotWriter,
    store: SnapshotStore,
    make_snapshot: MakeSnapshot,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = Refusing(store, monkeypatch, times=None)
    writer.offer(make_snapshot(1))
    assert writer.save_last(0.6, lambda: False)
    assert disk.tries > 1


@pytest.mark.parametrize("how", ["flush", "close", "offer"])
def test_a_programming_error_on_the_thread_is_raised(
    store: SnapshotStore, make_snapshot: MakeSnapshot, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(store, "publish", raiser(ZeroDivisionError("a bug")))
    writer = SnapshotWriter(store, print)
    writer.offer(make_snapshot(1))
    calls: dict[str, Callable[[], object]] = {
        "flush": writer.flush,
        "close": writer.close,
        "offer": lambda: writer.offer(make_snapshot(2), wait=True),
    }
    with pytest.raises(ZeroDivisionError, match="a bug"):
        calls[how]()
    writer.close()
    assert writer_threads() == []


def test_a_mistake_in_the_snapshot_is_raised_by_offer_itself(writer: SnapshotWriter) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        writer.offer(Snapshot(step=1, tensors={}, state={"loss": float("nan")}))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    where = tmp_path / "disk"
    where.mkdir()
    need(MEMORY_DISK)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(where)], check=True)
    try:
        yield where
    finally:
        subprocess.run(["umount", str(where)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("probed", [True, False])
def test_a_full_disk_is_survived(
    small_disk: Path, make_snapshot: MakeSnapshot, monkeypatch: pytest.MonkeyPatch, probed: bool
) -> None:
    if not probed:
        monkeypatch.setattr(SnapshotStore, "_check_space", lambda *_: None)
    store = SnapshotStore(small_disk / "snapshots", keep_last=2)
    said: list[str] = []
    with closing(SnapshotWriter(store, said.append)) as writer:
        writer.offer(make_snapshot(1))
        writer.flush()
        ballast = small_disk / "ballast"
        ballast.write_bytes(bytes(1_000_000))
        writer.offer(make_snapshot(2, size=600_000))
        writer.flush()
        assert len(said) == 1
        assert re.fullmatch(
            r"the snapshot of step 2 could not be written: No space left on device "
            r"\(needs 2\.4\d? MB, 2\.\d+ MB free\); training goes on, "
            r"the newest good snapshot is step 1",
            said[0],
        )
        assert [p.name for p in store.directory.iterdir()] == ["step-000000000001"]
        ballast.unlink()
        writer.offer(make_snapshot(3, size=600_000))
        writer.flush()
        assert len(said) == 1
    assert store.steps() == [1, 3]


LIMITED = """
import json, resource, sys
from pathlib import Path
import torch
from paceline.checkpoint.format import Snapshot
from paceline.checkpoint.store import SnapshotStore
from paceline.checkpoint.writer import SnapshotWriter

def snapshot(step):
    tensors = {"model": {"x": torch.zeros(100)}, "optimizer": {"x": torch.zeros(100_000)}}
    return Snapshot(step=step, tensors=tensors, state={})

said = []
store = SnapshotStore(Path(sys.argv[1], "snapshots"), keep_last=2)
writer = SnapshotWriter(store, said.append)
writer.offer(snapshot(1))
writer.flush()
unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, unlimited[1]))
writer.offer(snapshot(2))
writer.flush()
left = sorted(path.name for path in store.directory.iterdir())
resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
writer.offer(snapshot(3))
writer.close()
print(json.dumps([said, left, store.steps()]))
"""


def test_a_file_too_large_for_the_file_system_is_survived(tmp_path: Path) -> None:
    source = str(Path(paceline.__path__[0]).parent)
    ended = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": source, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True, text=True, check=True, timeout=patient(120),
    )  # fmt: skip
    said, left, steps = json.loads(ended.stdout)
    assert len(said) == 1
    assert re.search(r"step 2 could not be written: File too large \(needs 40\d kB, ", said[0])
    assert left == ["step-000000000001"]
    assert steps == [1, 3]


def raiser(error: Exception) -> Callable[..., object]:
    def fail(*_: object, **__: object) -> object:
        raise error

    return fail
