import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import paceline
from paceline.checkpoint import manifest
from paceline.checkpoint.format import Snapshot, read_snapshot
from paceline.checkpoint.manifest import STATE, TENSORS
from paceline.checkpoint.store import SnapshotStore
from paceline.errors import SnapshotError, UsageError
from tests.launch.waiting import patient
from tests.support.snapshots import publish

MakeSnapshot = Callable[..., Snapshot]
Same = Callable[[Snapshot, Snapshot], bool]

PHASES = [
    "begin", "tensors.safetensors", "state.json", "manifest.json", "synced", "renamed", "durable",
    "best", "removed old",
]  # fmt: skip
REPLACING = [*PHASES[:5], "replaced", *PHASES[5:]]


def unexpected(message: str) -> None:
    raise AssertionError(message)


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "snapshots", keep_last=2)


def names(store: SnapshotStore) -> list[str]:
    return sorted(p.name for p in store.directory.iterdir())


def test_phases_come_in_the_order_of_the_protocol(
    store: SnapshotStore, make_snapshot: MakeSnapshot
) -> None:
    seen: list[str] = []
    publish(store, make_snapshot(1), best=True, phase=seen.append)
    assert seen == PHASES
    seen.clear()
    publish(store, make_snapshot(1), best=True, phase=seen.append)
    assert seen == REPLACING


def test_an_empty_store(store: SnapshotStore) -> None:
    assert store.steps() == []
    assert store.newest_good(unexpected) is None
    assert store.best() is None
    store.sweep()
    with pytest.raises(UsageError, match=r"no snapshot 'last' for .*\. It holds none: none "):
        store.resolve("last")


def test_the_last_and_the_best_are_kept(store: SnapshotStore, make_snapshot: MakeSnapshot) -> None:
    for step in range(1, 7):
        published = publish(store, make_snapshot(step), best=step in (1, 3))
        assert published == store.path_of(step)
    assert store.steps() == [3, 5, 6]
    assert store.best() == store.path_of(3)
    assert names(store) == ["best.json", *(store.path_of(s).name for s in (3, 5, 6))]
    assert json.loads((store.directory / "best.json").read_bytes()) == {
        "snapshot": "step-000000000003"
    }


def test_the_one_just_published_is_kept_also_below_later_ones(
    store: SnapshotStore, make_snapshot: MakeSnapshot
) -> None:
    for step in (10, 20, 5):
        publish(store, make_snapshot(step))
    assert store.steps() == [5, 10, 20]


def test_one_of_the_same_step_is_replaced(
    store: SnapshotStore, make_snapshot: MakeSnapshot, same: Same
) -> None:
    publish(store, make_snapshot(1))
    newer = make_snapshot(1, size=50)
    publish(store, newer)
    assert same(read_snapshot(store.path_of(1)), newer)
    assert names(store) == ["step-000000000001"]


def test_a_damaged_one_is_set_aside_and_the_one_before_is_used(
    store: SnapshotStore, make_snapshot: MakeSnapshot, same: Same
) -> None:
    draw = random.Random(1)
    publish(store, make_snapshot(1))
    for round_ in range(12):
        publish(store, make_snapshot(2), best=True)
        files = sorted(store.path_of(2).iterdir())
        path = files[round_ % len(files)]
        content = bytearray(path.read_bytes())
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
        said: list[str] = []
        found = store.newest_good(said.append)
        assert found is not None
        assert same(found, make_snapshot(1))
        aside = "step-000000000002.damaged" + (f"-{round_}" if round_ else "")
        assert len(said) == 1
        assert path.name in said[0]
        assert f"set aside as {aside}, the snapshot before it" in said[0]
        assert (store.directory / aside).is_dir()
        assert store.best() is None


def test_all_damaged_is_none(store: SnapshotStore, make_snapshot: MakeSnapshot) -> None:
    said: list[str] = []
    for step in (1, 2):
        (publish(store, make_snapshot(step)) / "state.json").unlink()
    assert store.newest_good(said.append) is None
    assert "the training starts from the beginning" in said[-1]
    assert ["step-000000000002/" in said[0], "step-000000000001/" in said[1]] == [True, True]


def test_a_newer_format_is_neither_damage_nor_passed_over(
    store: SnapshotStore, make_snapshot: MakeSnapshot
) -> None:
    publish(store, make_snapshot(1))
    path = publish(store, make_snapshot(2)) / "manifest.json"
    path.write_bytes(manifest._encode({"format": 99}))
    with pytest.raises(SnapshotError, match="format version 99; this Paceline knows: 2"):
        store.newest_good(unexpected)
    assert store.steps() == [1, 2]


def test_where_nothing_can_be_renamed_the_one_before_is_used_all_the_same(
    store: SnapshotStore, make_snapshot: MakeSnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store, make_snapshot(1))
    (publish(store, make_snapshot(2)) / "state.json").unlink()

    def read_only(self: Path, target: Path) -> Path:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "rename", read_only)
    said: list[str] = []
    found = store.newest_good(said.append)
    assert found is not None
    assert found.step == 1
    assert "can't be set aside (Read-only file system)" in said[0]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"snapshot": 3}',
        '{"snapshot": "../x"}',
        '{"snapshot": "step-000000000009"}',
    ],
)
def test_a_bad_pointer_is_no_best(
    store: SnapshotStore, make_snapshot: MakeSnapshot, content: str
) -> None:
    publish(store, make_snapshot(1), best=True)
    (store.directory / "best.json").write_text(content)
    assert store.best() is None
    publish(store, make_snapshot(2), best=True)
    assert store.best() == store.path_of(2)


def test_resolve(store: SnapshotStore, make_snapshot: MakeSnapshot, tmp_path: Path) -> None:
    for step in (1, 2):
        publish(store, make_snapshot(step), best=step == 1)
    assert store.resolve("best") == store.path_of(1)
    assert store.resolve("last") == store.path_of(2)
    assert store.resolve("step-000000000002") == store.path_of(2)
    assert store.resolve(str(store.path_of(1))) == store.path_of(1)
    with pytest.raises(UsageError, match="newest there: step-000000000001, step-000000000002"):
        store.resolve(str(tmp_path))


def test_keeping_only_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at least 2"):
        SnapshotStore(tmp_path, keep_last=1)


@pytest.mark.parametrize(
    ("step", "failing"),
    [(1, phase) for phase in REPLACING[: REPLACING.index("renamed") + 1]]
    + [(2, phase) for phase in PHASES[: PHASES.index("renamed") + 1]],
)
def test_a_failed_write_leaves_what_there_was(
    store: SnapshotStore, make_snapshot: MakeSnapshot, same: Same, failing: str, step: int
) -> None:
    def fail(phase: str) -> None:
        if phase == failing:
            raise OSError(errno.EIO, "Input/output error")

    publish(store, make_snapshot(1), best=True)
    newer = make_snapshot(step, size=50)
    with pytest.raises(OSError, match="Input/output"):
        publish(store, newer, phase=fail)
    store.sweep()
    expected = {"best.json", *(store.path_of(s).name for s in store.steps())}
    assert set(names(store)) == expected
    found = store.newest_good(unexpected)
    assert found is not None
    assert same(found, newer if failing == "renamed" else make_snapshot(1))
    publish(store, newer)


def test_a_failed_replacement_puts_the_old_one_back_at_once(
    store: SnapshotStore, make_snapshot: MakeSnapshot, same: Same
) -> None:
    """Without a new start, which would sweep: the training goes on, and may resume from it."""

    def fail(phase: str) -> None:
        if phase == "replaced":
            raise OSError(errno.EIO, "Input/output error")

    publish(store, make_snapshot(1), best=True)
    with pytest.raises(OSError, match="Input/output"):
        publish(store, make_snapshot(1, size=50), phase=fail)
    assert names(store) == ["best.json", "step-000000000001"]
    assert same(read_snapshot(store.path_of(1)), make_snapshot(1))


def test_what_wouldnt_fit_is_refused_before_it_is_written(store: SnapshotStore) -> None:
    store.check_room(1)
    with pytest.raises(OSError, match="No space left") as caught:
        store.check_room(shutil.disk_usage(store.directory).total)
    assert caught.value.errno == errno.ENOSPC


class Disk:
    """What a power cut would leave of a directory: the names of its last fsync."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.durable: dict[str, int] = {}
        self._fsync, self._rmtree = os.fsync, shutil.rmtree
        monkeypatch.setattr(os, "fsync", self.fsync)
        monkeypatch.setattr(shutil, "rmtree", self.rmtree)

    def fsync(self, descriptor: int) -> None:
        if self.directory.is_dir() and os.path.samestat(
            os.fstat(descriptor), self.directory.stat()
        ):
            self.durable = self.names()
        self._fsync(descriptor)

    def rmtree(self, path: Path, *, ignore_errors: bool = False) -> None:
        """What another one replaces may go once a power cut can't take that one away."""
        if path.name.startswith(".replaced-") and path.is_dir():
            kept = path.name.removeprefix(".replaced-")
            assert self.durable.get(kept) == self.names()[kept]
        self._rmtree(path, ignore_errors=ignore_errors)

    def names(self) -> dict[str, int]:
        """Name the snapshots, with what tells one from another of the same name."""
        steps = [path for path in self.directory.iterdir() if path.name.startswith("step-")]
        return {path.name: path.stat().st_ino for path in steps}


def test_what_is_published_outlives_a_power_cut(
    store: SnapshotStore, make_snapshot: MakeSnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(store.directory, monkeypatch)
    for step in (1, 1, 2):
        publish(store, make_snapshot(step))
        assert disk.durable == disk.names()
        assert store.path_of(step).name in disk.durable


def test_what_is_received_outlives_a_power_cut(
    store: SnapshotStore,
    make_snapshot: MakeSnapshot,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = SnapshotStore(tmp_path / "source", keep_last=2)
    path = publish(source, make_snapshot(1))
    pieces = [(name, memoryview((path / name).read_bytes())) for name in (STATE, TENSORS)]
    disk = Disk(store.directory, monkeypatch)
    for _ in range(2):
        store.receive(source.manifest(1), pieces)
        assert disk.durable == disk.names()
        assert store.path_of(1).name in disk.durable


def test_what_a_new_start_puts_back_outlives_a_power_cut(
    store: SnapshotStore, make_snapshot: MakeSnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = publish(store, make_snapshot(1))
    path.rename(store.directory / f".replaced-{path.name}")  # killed between two renames
    disk = Disk(store.directory, monkeypatch)
    store.sweep()
    assert list(disk.durable) == [path.name]


KILLER = """
import os, signal, sys
from pathlib import Path
import torch
from paceline.checkpoint.format import Snapshot, copy_to_host
from paceline.checkpoint.store import SnapshotStore

def snapshot(step, value):
    x = {"x": torch.full((1000,), value)}
    tensors = {"model": x, "optimizer": x, "workers": x}
    return Snapshot(step=step, tensors=tensors, state={"value": value})

def die(phase):
    if phase == wanted:
        os.kill(os.getpid(), signal.SIGKILL)

torch.set_num_threads(1)
for step in (2, 3):
    for wanted in sys.argv[2:]:
        store = SnapshotStore(Path(sys.argv[1], f"{step}-{wanted}"), keep_last=2)
        for old in (1, 2):
            store.publish(copy_to_host(snapshot(old, 0.0)), best=True)
        child = os.fork()
        if child == 0:
            store.publish(copy_to_host(snapshot(step, 1.0)), best=True, phase=die)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        print(step, wanted, os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0)
"""


@pytest.mark.slow
def test_kill_9_at_every_phase_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    source = str(Path(paceline.__path__[0]).parent)
    ended = subprocess.run(
        [sys.executable, "-c", KILLER, str(tmp_path), *REPLACING],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True, text=True, check=True, timeout=patient(120),
    )  # fmt: skip
    signals = dict(line.rsplit(" ", 1) for line in ended.stdout.splitlines())
    for step in (2, 3):
        for phase in REPLACING:
            died = not (step == 3 and phase == "replaced")
            assert signals[f"{step} {phase}"] == (str(int(signal.SIGKILL)) if died else "0")
            store = SnapshotStore(tmp_path / f"{step}-{phase}", keep_last=2)
            before = store.newest_good(unexpected)
            assert before is not None
            store.sweep()
            after = store.newest_good(unexpected)
            assert after is not None
            assert set(names(store)) == {
                "best.json",
                *(store.path_of(s).name for s in store.steps()),
            }
            new = REPLACING.index(phase) >= REPLACING.index("renamed") or not died
            assert (after.step, after.state) == (
                (step, {"value": 1.0}) if new else (2, {"value": 0.0})
            )
            assert store.best() is not None
