"""What is copied, in which order, what is removed, and whose the place is."""

import json
import shutil
from pathlib import Path

import pytest

from paceline.checkpoint.format import read_snapshot
from paceline.checkpoint.remote.copier import OWNER, TakenError
from paceline.checkpoint.remote.fetch import fetch_run
from paceline.checkpoint.remote.record import CopyRecord
from paceline.checkpoint.store import SnapshotStore
from paceline.errors import InfrastructureError, UsageError
from paceline.results.run_directory import RunDirectory
from tests.checkpoint.conftest import MakeSnapshot, Same
from tests.checkpoint.remote.places import RUN_JSON, StoreUnderTest, a_run, copier_of, publish


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return a_run(tmp_path / "run")


@pytest.fixture
def store(tmp_path: Path) -> StoreUnderTest:
    return StoreUnderTest(tmp_path / "away")


def files_of(root: Path) -> dict[str, bytes]:
    found = (path for path in root.rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in found}


def test_the_place_mirrors_the_run(
    run: RunDirectory, store: StoreUnderTest, make_snapshot: MakeSnapshot, tmp_path: Path
) -> None:
    publish(run, make_snapshot(10), best=True)
    (run.path / "notes.txt").write_text("mine")
    run.tracker_json("wandb").write_text('{"id": "r1"}')
    copier_of(run, store).copy()
    there, here = files_of(tmp_path / "away"), files_of(run.path)
    del there[OWNER], here["notes.txt"], here["copy.json"]
    assert there == here


def test_the_manifest_comes_last_and_the_table_before_it(
    run: RunDirectory, store: StoreUnderTest, make_snapshot: MakeSnapshot
) -> None:
    publish(run, make_snapshot(10), best=True)
    copier_of(run, store).copy()
    place = "snapshots/step-000000000010"
    order = [
        store.done.index(f"write {name}")
        for name in (
            f"{place}/tensors.safetensors",
            f"{place}/state.json",
            "run.json",
            "metrics.csv",
            f"{place}/manifest.json",
            "snapshots/best.json",
        )
    ]
    assert order == sorted(order)


def test_a_large_table_is_sent_again_with_a_snapshot_or_once_it_has_grown(
    run: RunDirectory, store: StoreUnderTest, make_snapshot: MakeSnapshot
) -> None:
    copier, sent = copier_of(run, store), []

    def grow_to(size: int) -> None:
        """Add rows, and note whether the table was copied at the next look."""
        run.steps_csv.write_bytes(bytes(size))
        copier.copy(is_last=False)
        sent.append(store.done.count("write steps.csv"))

    for size in (40_000, 41_000, 100_000, 101_000, 124_999, 125_000, 126_000):
        grow_to(size)
    assert sent == [1, 2, 3, 3, 3, 4, 4]
    grow_to(90_000)  # a resume has dropped rows
    publish(run, make_snapshot(10))
    grow_to(90_001)
    copier.copy()
    assert store.done.count("write steps.csv") == 6
    assert sent[-2:] == [5, 6]
    grow_to(90_002)
    copier.copy()
    assert store.done.count("write steps.csv") == 7


def test_old_ones_go_when_the_new_one_is_whole_but_not_the_best(
    run: RunDirectory, store: StoreUnderTest, make_snapshot: MakeSnapshot
) -> None:
    copier = copier_of(run, store, keep=2)
    for step in (10, 20, 30, 40):
        publish(run, make_snapshot(step), best=step == 10, keep=2)
        copier.copy()
    assert store.whole() == [10, 30, 40]
    manifest = "snapshots/step-000000000020/manifest.json"
    assert store.done.index("write snapshots/step-000000000040/manifest.json") < store.done.index(
        f"delete {manifest}"
    )
    removed = [entry for entry in store.done if entry.startswith("delete")]
    assert removed[0] == f"delete {manifest}"
    assert len(removed) == 3


def test_what_lags_goes_on_with_the_newest_and_counts(
    run: RunDirectory, store: StoreUnderTest, make_snapshot: MakeSnapshot
) -> None:
    copier = copier_of(run, store)
    for step in (10, 20, 30):
        publish(run, make_snapshot(step), best=step == 20)
    copier.copy()
    copier.copy()
    assert store.whole() == [20, 30]
    assert (copier.record.newest_step, copier.record.snapshots, copier.record.skipped) == (30, 2, 2)
    publish(run, make_snapshot(40))
    copier.copy()
    assert (copier.record.snapshots, copier.record.skipped) == (3, 2)


def test_a_snapshot_isnt_removed_here_while_it_is_copied(
    run: RunDirectory, store: StoreUnderTest, make_snapshot: MakeSnapshot
) -> None:
    publish(run, make_snapshot(10), keep=2)
    copier = copier_of(run, store)

    def train_on(what: str, name: str) -> None:
        if what == "write" and name.endswith("10/tensors.safetensors"):
            for step in (20, 30, 40):
                publish(run, make_snapshot(step), keep=2)

    store.before = train_on
    copier.copy()
    assert store.whole() == [10]
    assert SnapshotStore(run.snapshots, 2).steps() == [10, 30, 40]
    publish(run, make_snapshot(50), keep=2)
    assert SnapshotStore(run.snapshots, 2).steps() == [40, 50]


def test_one_that_changes_while_it_is_copied_never_becomes_whole(
    run: RunDirectory, store: StoreUnderTest, make_snapshot: MakeSnapshot
) -> None:
    publish(run, make_snapshot(10))
    publish(run, make_snapshot(20))
    copier = copier_of(run, store)
    (run.snapshots / "step-000000000020/state.json").write_text("{}")
    copier.copy()
    assert store.whole() == []
    publish(run, make_snapshot(30))
    copier.copy()
    assert store.whole() == [30]


def test_another_try_goes_on_where_the_store_failed(
    run: RunDirectory, store: StoreUnderTest, make_snapshot: MakeSnapshot
) -> None:
    publish(run, make_snapshot(10))
    copier = copier_of(run, store)

    def fail(what: str, name: str) -> None:
        if name.endswith("state.json"):
            raise OSError("the cable")

    store.before = fail
    with pytest.raises(OSError, match="the cable"):
        copier.copy()
    assert store.whole() == []
    store.before = lambda what, name: None
    copier.copy()
    assert store.whole() == [10]
    assert sum(entry.endswith("tensors.safetensors") for entry in store.done) == 1


def test_a_training_that_went_back_leaves_no_later_steps(
    run: RunDirectory, store: StoreUnderTest, make_snapshot: MakeSnapshot
) -> None:
    publish(run, make_snapshot(10))
    publish(run, make_snapshot(90))
    copier_of(run, store).copy()
    shutil.rmtree(run.snapshots / "step-000000000090")
    copier = copier_of(run, store)
    copier.copy()
    assert 90 in store.whole()  # not before there is a newer one of this branch
    publish(run, make_snapshot(20))
    copier.copy()
    assert store.whole() == [10, 20]
    assert copier.record.newest_step == 20


def test_the_same_step_with_another_result_is_copied_again(
    run: RunDirectory,
    store: StoreUnderTest,
    make_snapshot: MakeSnapshot,
    tmp_path: Path,
    same: Same,
) -> None:
    publish(run, make_snapshot(10))
    copier = copier_of(run, store)
    copier.copy()
    publish(run, make_snapshot(10, size=50))
    copier.copy()
    found = read_snapshot(tmp_path / "away/snapshots/step-000000000010")
    assert same(found, make_snapshot(10, size=50))


def test_leftovers_of_a_copy_that_was_cut_short_go(
    run: RunDirectory, store: StoreUnderTest, make_snapshot: MakeSnapshot, tmp_path: Path
) -> None:
    left = tmp_path / "away/snapshots/step-000000000005"
    left.mkdir(parents=True)
    (left / "tensors.safetensors").write_bytes(b"half")
    publish(run, make_snapshot(10))
    copier_of(run, store).copy()
    assert not left.exists()


def test_a_place_belongs_to_one_training(
    run: RunDirectory, store: StoreUnderTest, tmp_path: Path
) -> None:
    copier_of(run, store).copy()
    with pytest.raises(TakenError, match=r"holds the copies of another training.*paceline resume"):
        copier_of(a_run(tmp_path / "other"), store)
    copier_of(run, store)


def test_a_machine_that_goes_on_takes_the_place_over(
    run: RunDirectory, store: StoreUnderTest, make_snapshot: MakeSnapshot, tmp_path: Path
) -> None:
    publish(run, make_snapshot(10))
    old = copier_of(run, store)
    old.copy()
    other = RunDirectory.named(tmp_path / "elsewhere")
    fetch_run("file:///away/run", store, other, print)
    copier_of(other, store)
    for _ in range(2):
        with pytest.raises(TakenError, match="has gone on with this training"):
            old.copy()
        publish(run, make_snapshot(20))
    assert store.whole() == [10]
    with pytest.raises(TakenError, match="another machine has gone on"):
        copier_of(run, store)


def test_a_place_without_a_run_is_given_up_again(run: RunDirectory, store: StoreUnderTest) -> None:
    copier = copier_of(run, store)
    copier.release()
    assert store.names() == []
    copier = copier_of(run, store)
    copier.copy()
    copier.release()
    assert OWNER in store.names()


@pytest.fixture
def copied(run: RunDirectory, store: StoreUnderTest, make_snapshot: MakeSnapshot) -> RunDirectory:
    (run.path / "tracker-wandb.json").write_text("{}")
    for step in (10, 20, 30):
        publish(run, make_snapshot(step), best=step == 10)
        copier_of(run, store).copy()
    return run


def test_a_run_is_fetched_with_the_newest_and_the_best(
    copied: RunDirectory,
    store: StoreUnderTest,
    make_snapshot: MakeSnapshot,
    same: Same,
    tmp_path: Path,
) -> None:
    said: list[str] = []
    other = RunDirectory.named(tmp_path / "elsewhere")
    fetch_run("file:///away/run", store, other, said.append)
    snapshots = SnapshotStore(other.snapshots, 3)
    assert snapshots.steps() == [10, 30]
    assert snapshots.best() == snapshots.path_of(10)
    assert same(read_snapshot(snapshots.path_of(30)), make_snapshot(30))
    assert other.run_json.read_text() == RUN_JSON
    assert other.metrics_csv.read_bytes() == copied.metrics_csv.read_bytes()
    assert other.rank_log(0).read_text() == "a line\n"
    assert (other.path / "tracker-wandb.json").exists()
    assert said == [f"Fetched file:///away/run into {other.path}: the snapshot of step 30"]
    record, owner = CopyRecord.read(other), CopyRecord.read(copied)
    assert record is not None
    assert owner is not None
    assert record.takes_over == owner.token != record.token


def test_the_end_is_fetched_too_until_the_training_goes_on(
    copied: RunDirectory, store: StoreUnderTest, tmp_path: Path
) -> None:
    copied.summary_json.write_text('{"steps": 30}')
    copier = copier_of(copied, store)
    copier.copy()
    copier.copy_summary()
    other = RunDirectory.named(tmp_path / "elsewhere")
    fetch_run("file:///away/run", store, other, lambda _: None)
    assert other.read_summary() == {"steps": 30}
    copied.remove_summary()
    copier_of(copied, store).copy()
    third = RunDirectory.named(tmp_path / "third")
    fetch_run("file:///away/run", store, third, lambda _: None)
    assert not third.summary_json.exists()


def test_a_damaged_copy_is_passed_over(
    copied: RunDirectory, store: StoreUnderTest, tmp_path: Path
) -> None:
    path = tmp_path / "away/snapshots/step-000000000030/tensors.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    said: list[str] = []
    other = RunDirectory.named(tmp_path / "elsewhere")
    fetch_run("file:///away/run", store, other, said.append)
    assert SnapshotStore(other.snapshots, 3).steps() == [10, 20]
    assert "the copy of the snapshot of step 30 can't be used" in said[0]


def test_no_run_comes_of_copies_that_are_all_damaged(
    copied: RunDirectory, store: StoreUnderTest, tmp_path: Path
) -> None:
    for path in (tmp_path / "away/snapshots").glob("*/state.json"):
        path.write_text("{}")
    other = RunDirectory.named(tmp_path / "elsewhere")
    with pytest.raises(InfrastructureError, match="none of the 3 snapshots there is whole"):
        fetch_run("file:///away/run", store, other, print)
    assert not other.path.exists()


def test_only_names_of_a_run_are_written(
    copied: RunDirectory, store: StoreUnderTest, tmp_path: Path
) -> None:
    for name in ("evil.sh", "logs/evil.sh", "snapshots/evil"):
        (tmp_path / "away" / name).write_text("evil")
    other = RunDirectory.named(tmp_path / "elsewhere")
    fetch_run("file:///away/run", store, other, print)
    assert [name for name in files_of(other.path) if "evil" in name] == []


def test_the_place_of_all_runs_says_which_there_are(copied: RunDirectory, tmp_path: Path) -> None:
    shutil.move(tmp_path / "away", tmp_path / "all/digits-1")
    store = StoreUnderTest(tmp_path / "all")
    with pytest.raises(UsageError, match="Add a run's name to the URL: digits-1"):
        fetch_run("file:///all", store, RunDirectory.named(tmp_path / "elsewhere"), print)
    assert not (tmp_path / "elsewhere").exists()


def test_what_is_there_isnt_written_over(copied: RunDirectory, store: StoreUnderTest) -> None:
    before = files_of(copied.path)
    with pytest.raises(UsageError, match="already holds a training"):
        fetch_run("file:///away/run", store, copied, print)
    assert files_of(copied.path) == before


def test_a_record_that_cant_be_is_refused(run: RunDirectory) -> None:
    for content in ("{", '{"format": 2}', '{"format": 1, "token": "a", "url": "s3://b", "x": 1}'):
        run.copy_json.write_text(content)
        with pytest.raises(UsageError, match=r"copy\.json can't be read"):
            CopyRecord.read(run)


def test_a_record_goes_on_at_its_place_unless_another_is_asked_for(run: RunDirectory) -> None:
    CopyRecord(url="s3://bucket/a/other-name", newest_step=5).write(run)
    same = CopyRecord.for_run(run, "s3://bucket/a")
    assert (same.url, same.newest_step) == ("s3://bucket/a/other-name", 5)
    other = CopyRecord.for_run(run, "s3://bucket/b")
    assert (other.url, other.newest_step) == ("s3://bucket/b/run", -1)
    assert same.token == other.token  # so that it can go back to its first place
    assert json.loads(run.copy_json.read_text())["token"] == same.token
