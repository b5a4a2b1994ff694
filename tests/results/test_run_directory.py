import errno
import fcntl
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest

from paceline.errors import StorageError, UsageError
from paceline.files import write_json
from paceline.results.run_directory import RunDirectory


def test_a_new_run_directory(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "runs" / "first")
    run.create()
    assert sorted(path.name for path in run.path.iterdir()) == ["logs", "snapshots"]
    assert run.rank_log(3).name == "rank-3.log"


def test_an_empty_directory_will_do(tmp_path: Path) -> None:
    RunDirectory(tmp_path).create()


def test_a_summary_that_cant_be_removed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path)
    run.remove_summary()  # there is none

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(StorageError, match=r"summary\.json can't be written: Permission denied"):
        run.remove_summary()


def test_a_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert RunDirectory.named("runs/x").path == tmp_path / "runs" / "x"
    assert RunDirectory.named("runs/../a/./x").path == tmp_path / "a" / "x"
    # What `..` goes back from may be a link.
    (tmp_path / "far" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "inner")
    assert RunDirectory.named("link/../x").path == tmp_path / "far" / "x"
    assert RunDirectory.named("link/x").path == tmp_path / "link" / "x"


def test_a_training_is_never_overwritten(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.create()
    run.run_json.write_text("{}")
    with pytest.raises(UsageError, match=r"already holds a training.*paceline resume .*--run-dir"):
        run.create()


def test_one_that_runs_is_not_to_be_resumed(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.create()
    run.run_json.write_text("{}")
    with run.lock(), pytest.raises(UsageError, match=r"that is still running\. Name another") as e:
        run.check_new()
    assert "resume" not in str(e.value)


def test_what_cannot_be_made_is_refused_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "a" / "b"):
        with pytest.raises(UsageError, match=r"can't be written \(Not a directory\)"):
            RunDirectory(path).check_new()
    RunDirectory(tmp_path / "a" / "b").check_new()
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    with pytest.raises(UsageError, match=r"can't be written \(Permission denied\)"):
        RunDirectory(tmp_path / "a" / "b").check_new()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UsageError, match="is not empty and holds no training"):
        RunDirectory(tmp_path).create()
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_what_was_rendered_for_a_cluster_may_be_there_before(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.cluster.mkdir()
    run.create()
    assert run.cluster.is_dir()


def test_a_training_killed_while_it_wrote_its_first_file_can_be_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create()

    def killed(descriptor: int) -> None:
        os._exit(9)

    child = os.fork()
    if child == 0:
        monkeypatch.setattr(os, "fsync", killed)
        write_json(run.run_json, {})
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert any(path.name.startswith(".run.json.") for path in run.path.iterdir())
    run.create()


def test_only_what_holds_no_snapshot_is_discarded(tmp_path: Path) -> None:
    """A training whose run.json was removed meanwhile keeps what it can't make again."""
    new, begun = RunDirectory(tmp_path / "new"), RunDirectory(tmp_path / "begun")
    for run in (new, begun):
        run.create()
    (begun.snapshots / "step-000000000007").mkdir()
    for run in (new, begun):
        run.discard()
    assert not new.path.exists()
    assert (begun.snapshots / "step-000000000007").is_dir()


def test_the_usual_folder_goes_with_the_last_that_is_discarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    first, second = (RunDirectory.usual("digits", moment).claim() for _ in range(2))
    named = RunDirectory.named("mine/run")
    for run in (first, second, named):
        run.create()
    first.discard()
    assert second.path.is_dir()
    second.discard()
    named.discard()
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]  # the user's own stays


def test_a_usual_folder_that_another_removes_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mkdir, removed = os.mkdir, list[str]()

    def remove_once(path: str, mode: int) -> None:
        mkdir(path, mode)
        if Path(path).name == "runs" and not removed:
            removed.append(path)
            Path(path).rmdir()

    monkeypatch.setattr(os, "mkdir", remove_once)
    run = RunDirectory.usual("digits", datetime(2026, 1, 1, tzinfo=UTC)).claim()
    assert removed
    assert run.path.is_dir()


_HEADER = "epoch,step,time_s\n"


def test_a_launcher_killed_between_the_table_and_run_json_is_in_nobodys_way(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.create()
    with run.lock():
        run.metrics_csv.write_text(_HEADER)
        run.steps_csv.write_text(_HEADER)
    run.create()


@pytest.mark.parametrize(
    ("table", "is_locked_once"),
    [(_HEADER + "1,23,4.5\n", True), ("name,value\n", True), (_HEADER, False)],
    ids=["rows", "another's", "never ours"],
)
def test_a_table_that_may_be_somebodys_is_left_alone(
    table: str, is_locked_once: bool, tmp_path: Path
) -> None:
    run = RunDirectory(tmp_path)
    if is_locked_once:
        with run.lock():
            pass
    run.metrics_csv.write_text(table)
    with pytest.raises(UsageError, match="is not empty and holds no training"):
        run.create()


@pytest.mark.parametrize("where", ["", "below", "below/deeper"])
def test_a_file_in_the_way(where: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"can't be written \(.+\)\. Name another one"):
        RunDirectory(tmp_path / "file" / where).create()


def test_a_directory_that_cant_be_written() -> None:
    # /proc takes no new directories from anyone, root included.
    with pytest.raises(UsageError, match=r"can't be written"):
        RunDirectory(Path("/proc/self/run")).create()


def test_a_name_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"can't be written \(File name too long\)"):
        RunDirectory(tmp_path / ("x" * 300)).create()


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "holds no training"), ("{", "can't be read"), ("[]", "should hold a JSON object")],
)
def test_a_run_json_that_cant_be_read(content: str | None, message: str, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    if content is not None:
        run.run_json.write_text(content)
    with pytest.raises(UsageError, match=message):
        run.read_run()


HOLD = """
import sys
from pathlib import Path
from paceline.files import write_json
from paceline.results.run_directory import RunDirectory
with RunDirectory(Path(sys.argv[1])).lock():
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_one_training_at_a_time(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        said = (
            rf"another training is running in .* \(process {holder.pid} on {os.uname().nodename}\)"
        )
        with pytest.raises(UsageError, match=said), run.lock():
            pass
        assert run.is_locked()
        holder.kill()  # the kernel frees the lock, however its owner ends
        holder.wait()
        assert not run.is_locked()
        with run.lock():
            pass
    with run.lock():
        pass


def test_asking_for_the_lock_keeps_no_training_from_starting(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    with run.lock():
        pass
    asking = os.open(tmp_path / "run.lock", os.O_RDONLY)
    fcntl.flock(asking, fcntl.LOCK_SH)
    threading.Timer(0.02, os.close, [asking]).start()
    with run.lock():
        assert run.is_locked()


def test_a_run_directory_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert RunDirectory.named("~/runs/a").path == tmp_path / "runs" / "a"


def test_the_command_to_go_on_with_can_be_pasted(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "a run")
    run.create()
    run.run_json.write_text("{}")
    with pytest.raises(UsageError, match=f"paceline resume '{run.path}';"):
        run.create()


def test_a_lock_in_a_directory_that_is_gone(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "absent")
    with pytest.raises(UsageError, match="can't be written"), run.lock():
        pass


def test_the_newest_snapshot_is_that_of_the_last_step(tmp_path: Path) -> None:
    run = RunDirectory.named(tmp_path)
    assert run.newest_step() == -1  # nor one of step 0
    for step, newest in ((0, 0), (12, 12), (3, 12)):
        path = run.snapshots / f"step-{step:012d}"
        path.mkdir(parents=True)
        (path / "manifest.json").write_text(f'{{"step": {step}}}')
        assert run.newest_step() == newest


def test_what_killed_writers_have_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.make()
    left = [
        run.path / ".profile.json.0123abcd",
        run.path / ".metrics.csv.0123abcd",
        run.logs / ".failure-rank-0.json.0123abcd",
        run.logs / ".probe-host-12",
        run.logs / "..probe-host-12.0123abcd",
    ]
    kept = [
        run.run_json,
        run.path / ".profile.json.mine",
        run.path / ".notes",
        run.logs / "failure-rank-0.json",
    ]
    for path in (*left, *kept):
        path.touch()
    with run.swept():
        assert [path for path in left if path.exists()] == []
        left[2].touch()  # a worker was killed, and another took its place
    assert [path for path in left if path.exists()] == []
    assert [path for path in kept if not path.exists()] == []


def test_names_of_runs_that_begin_at_once_differ(tmp_path: Path) -> None:
    usual = RunDirectory(tmp_path / "runs" / "digits-20260302-101500")
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: usual.claim(), range(8)))
    names = sorted(run.path.name.removeprefix(usual.path.name) for run in made)
    assert names == ["", "-2", "-3", "-4", "-5", "-6", "-7", "-8"]
    for run in made:
        run.create()  # nothing is in the way


def test_what_was_claimed_is_found_again_by_its_starter_alone(tmp_path: Path) -> None:
    usual = RunDirectory(tmp_path / "run")
    first, second = usual.claim("process 7 on a"), usual.claim("process 7 on b")
    assert second.path.name == "run-2"
    assert usual.claimed_by("process 7 on a") == first
    assert usual.claim("process 7 on b", again=True) == second
    assert usual.claimed_by("process 8 on a") is None
    assert usual.claim("process 8 on a", again=True).path.name == "run-3"
    third = usual.claim("process 7 on a")  # the same shell once more
    assert (third.path.name, usual.claimed_by("process 7 on a")) == ("run-4", third)
    third.create()
    third.discard()
    assert not third.path.exists()


def test_a_place_where_none_can_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(UsageError, match=r"runs/x can't be written .*--run-dir"):
        RunDirectory(tmp_path / "runs" / "x").claim()
