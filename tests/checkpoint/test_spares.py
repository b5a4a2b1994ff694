"""Snapshots written over old ones: what readers, crashes and power cuts see of it."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import paceline
from paceline.checkpoint import format as snapshot_format
from paceline.checkpoint import store as snapshot_store
from paceline.checkpoint.file_writer import write_file
from paceline.checkpoint.format import Snapshot, copy_to_host, read_snapshot
from paceline.checkpoint.manifest import FileEntry
from paceline.checkpoint.store import SnapshotStore
from paceline.checkpoint.writer import SnapshotWriter
from paceline.files import fsync_directory
from tests.launch.waiting import patient

MakeSnapshot = Callable[..., Snapshot]
Same = Callable[[Snapshot, Snapshot], bool]

FIRST_OVER = 5
"""With two kept and two spares, the fifth snapshot is the first that is written over another."""


def unexpected(message: str) -> None:
    raise AssertionError(message)


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "snapshots", keep_last=2)


def publish(store: SnapshotStore, snapshot: Snapshot, *, best: bool = False) -> int:
    """Publish, and give the number of the directory on disk."""
    return store.publish(copy_to_host(snapshot), best=best).stat().st_ino


def names(store: SnapshotStore) -> list[str]:
    return sorted(p.name for p in store.directory.iterdir())


def test_old_directories_are_used_again(
    store: SnapshotStore, make_snapshot: MakeSnapshot, same: Same
) -> None:
    sizes = [100, 100, 20_000, 100, 40_000, 100, 20_000, 20_000, 7, 100]
    numbers = [publish(store, make_snapshot(s, size=n)) for s, n in enumerate(sizes)]
    assert numbers[4:] == numbers[:6]
    for step in store.steps():
        assert same(read_snapshot(store.path_of(step)), make_snapshot(step, size=sizes[step]))
    assert store.steps() == [8, 9]
    store.drop_spares()
    assert names(store) == ["step-000000000008", "step-000000000009"]


def test_the_best_one_is_never_written_over(
    store: SnapshotStore, make_snapshot: MakeSnapshot, same: Same
) -> None:
    for step in range(12):
        publish(store, make_snapshot(step), best=step == 3)
    assert store.steps() == [3, 10, 11]
    assert same(read_snapshot(store.path_of(3)), make_snapshot(3))


def test_a_closed_writer_leaves_no_spares(
    store: SnapshotStore, make_snapshot: MakeSnapshot
) -> None:
    with closing(SnapshotWriter(store, unexpected)) as writer:
        for step in range(8):
            writer.offer(make_snapshot(step), wait=True)
        writer.flush()
        assert len(names(store)) > 2
    assert names(store) == ["step-000000000006", "step-000000000007"]


def test_the_next_owner_removes_the_spares_of_one_that_died(
    store: SnapshotStore, make_snapshot: MakeSnapshot
) -> None:
    for step in range(FIRST_OVER):
        publish(store, make_snapshot(step))
    SnapshotStore(store.directory, keep_last=2).sweep()
    assert names(store) == ["step-000000000003", "step-000000000004"]
    publish(store, make_snapshot(5))
    assert store.steps() == [4, 5]


def test_what_a_user_put_beside_the_files_isnt_carried_over(
    store: SnapshotStore, make_snapshot: MakeSnapshot
) -> None:
    for step in range(FIRST_OVER - 1):
        publish(store, make_snapshot(step))
        (store.path_of(step) / "note.txt").write_text("mine")
    for step in range(FIRST_OVER - 1, 12):
        publish(store, make_snapshot(step))
        assert not (store.path_of(step) / "note.txt").exists()


def test_a_reader_of_an_old_one_goes_on_reading_it(
    store: SnapshotStore, make_snapshot: MakeSnapshot
) -> None:
    publish(store, make_snapshot(0))
    with safe_open(store.path_of(0) / "tensors.safetensors", framework="pt") as file:
        for step in range(1, 12):
            publish(store, make_snapshot(step))
            assert torch.equal(
                file.get_tensor("model/bias"), make_snapshot(0).tensors["model"]["bias"]
            )


def test_large_ones_arent_kept_as_spares(
    store: SnapshotStore, make_snapshot: MakeSnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_store, "_SPARE_MAX_BYTES", 1000)
    for step in range(6):
        publish(store, make_snapshot(step))
    assert names(store) == ["step-000000000004", "step-000000000005"]


def test_spares_go_where_room_is_short(
    store: SnapshotStore, make_snapshot: MakeSnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(FIRST_OVER):
        publish(store, make_snapshot(step))

    def full(_: SnapshotStore, __: int) -> None:
        if len(names(store)) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(SnapshotStore, "_check_space", full)
    publish(store, make_snapshot(5))
    assert store.steps() == [4, 5]


def test_no_bit_changes_before_the_old_name_is_gone_for_good(
    store: SnapshotStore, make_snapshot: MakeSnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, Path]] = []
    rename, sync, write = Path.rename, fsync_directory, write_file

    def renamed(self: Path, target: Path) -> Path:
        seen.append(("renamed to", target))
        return rename(self, target)

    def synced(path: Path) -> None:
        seen.append(("synced", path))
        sync(path)

    def written(path: Path, chunks: list[memoryview], *, over: bool = False) -> FileEntry:
        seen.append(("over" if over else "new", path.parent))
        return write(path, chunks, over=over)

    monkeypatch.setattr(Path, "rename", renamed)
    monkeypatch.setattr(snapshot_store, "fsync_directory", synced)
    monkeypatch.setattr(snapshot_format, "write_file", written)
    for step in range(12):
        publish(store, make_snapshot(step))
    over = [i for i, (what, _) in enumerate(seen) if what == "over"]
    assert len(over) == 3 * (12 - FIRST_OVER + 1)
    for i in over:
        put_away = seen.index(("renamed to", seen[i][1]))
        assert ("synced", store.directory) in seen[put_away:i]


KILLER = """
import os, signal, sys
from pathlib import Path
import torch
from paceline.checkpoint import file_writer
from paceline.checkpoint.format import Snapshot, copy_to_host
from paceline.checkpoint.store import SnapshotStore

def snapshot(step, size=40_000):
    x = {"x": torch.full((size,), float(step))}
    return copy_to_host(Snapshot(step=step, tensors={"model": x}, state={"value": step}))

def deadly(number):
    calls = 0
    def wrap(name, real):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == number:
                if name == "write":
                    real(args[0], args[1][: len(args[1]) // 2 // 4096 * 4096 or 100])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)
        setattr(os, name, call)
    for name in ("write", "fsync", "fdatasync", "rename", "ftruncate"):
        wrap(name, getattr(os, name))
    file_writer._sync = os.fdatasync

torch.set_num_threads(1)
for published in (4, 5):
    number, died = 0, True
    while died:
        number += 1
        store = SnapshotStore(Path(sys.argv[1], f"{published}-{number}"), keep_last=2)
        for step in range(published):
            store.publish(snapshot(step), best=step == 0)
        assert len(store._spares) == published - 3
        child = os.fork()
        if child == 0:
            deadly(number)
            store.publish(snapshot(9, 30_000), best=False)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        died = os.WIFSIGNALED(status)
        assert os.WTERMSIG(status) == signal.SIGKILL if died else status == 0
    print(number)
"""


@pytest.mark.parametrize("published", [4, 5])
@pytest.mark.slow
def test_kill_9_anywhere_leaves_the_old_or_the_new(
    killed: dict[int, list[Path]], published: int
) -> None:
    """With 4 published before, a new directory is written; with 5 an old one is written over."""
    found = []
    for directory in killed[published]:
        store = SnapshotStore(directory, keep_last=2)
        store.sweep()
        newest = store.newest_good(unexpected)
        assert newest is not None
        found.append(newest.step)
        for step in store.steps():
            kept = read_snapshot(store.path_of(step))
            assert kept.state == {"value": step}
            assert bool((kept.tensors["model"]["x"] == step).all())
        assert len(store.steps()) >= 3
        assert store.best() == store.path_of(0)
    assert found == sorted(found)
    assert found.count(published - 1) >= 8
    assert found.count(9) >= 2
    assert set(found) == {published - 1, 9}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Path]]:
    """Give the directories of stores whose owner was killed before one call after another."""
    root = tmp_path_factory.mktemp("killed")
    ended = subprocess.run(
        [sys.executable, "-c", KILLER, str(root)],
        env={**os.environ, "PYTHONPATH": str(Path(paceline.__path__[0]).parent)},
        capture_output=True, text=True, check=True, timeout=patient(120),
    )  # fmt: skip
    counts = zip((4, 5), map(int, ended.stdout.split()), strict=True)
    return {
        published: [root / f"{published}-{n + 1}" for n in range(count)]
        for published, count in counts
    }
