"""Temporary files: gone with their process, or with the next one where that was killed."""

import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import process, util
from pathlib import Path

import pytest

from paceline.launch import scratch
from tests.launch.waiting import patient

_OWNER = """
import sys
from paceline.launch.scratch import own_directory, scratch_directory
with scratch_directory() as made:
    (made / "file").touch()
    print(own_directory(), made, flush=True)
    sys.stdin.read()
"""
_SEMAPHORE = """
from paceline.launch.scratch import own_directory
own_directory()
lock = multiprocessing.get_context("spawn").Lock()
print(lock._semlock.name, flush=True)
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory for temporary files that is this test's alone, with a short name."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@contextmanager
def owner(place: Path) -> Iterator[tuple["subprocess.Popen[str]", Path]]:
    """Run a process that has a directory until its input ends; it is killed with the block."""
    environment = os.environ | {"TMPDIR": str(place)}
    with subprocess.Popen(
        [sys.executable, "-c", _OWNER],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as running:  # fmt: skip
        assert running.stdout is not None
        own, made = map(Path, running.stdout.readline().split())
        assert (made / "file").exists()
        assert made.parent == own
        try:
            yield running, own
        finally:
            running.kill()


def left_in(place: Path) -> set[str]:
    (base,) = place.iterdir()
    assert base.name == f"paceline-{os.geteuid()}"
    assert base.stat().st_mode & 0o777 == 0o700
    return {path.name for path in base.iterdir()}


def test_at_its_end_a_process_leaves_nothing(place: Path) -> None:
    with owner(place) as (running, own):
        assert left_in(place) == {own.name, f"{own.name}.lock"}
        running.communicate("", timeout=patient(60))
    assert running.returncode == 0
    assert left_in(place) == set()


def test_a_living_owners_directory_is_locked(place: Path) -> None:
    """As systemd-tmpfiles looks at it, before it removes what nobody has touched for ten days."""
    with owner(place) as (running, own):
        found = os.open(own, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
        running.kill()
        running.wait(patient(60))
        fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(found)


def test_what_the_killed_leave_goes_at_the_next_start_and_nothing_of_the_living(
    place: Path,
) -> None:
    with owner(place) as (_, alive):
        with owner(place) as (running, dead):
            running.kill()
            running.wait(patient(60))
        assert (dead.exists(), alive.exists()) == (True, True)
        with owner(place) as (_, third):
            names = {alive.name, third.name}
            assert left_in(place) == names | {f"{name}.lock" for name in names}


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="semaphores are no files here")
def test_semaphores_of_a_killed_group_go_at_the_next_start(place: Path) -> None:
    """Killed with the process that multiprocessing has for removing them."""
    environment = os.environ | {"TMPDIR": str(place)}
    with subprocess.Popen(
        [sys.executable, "-c", f"import multiprocessing\n{_SEMAPHORE}\n{_OWNER}"],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    ) as running:  # fmt: skip
        assert running.stdout is not None
        (name,) = running.stdout.readline().decode().split()
        running.stdout.readline()
        os.killpg(running.pid, signal.SIGKILL)
    semaphore = Path("/dev/shm", f"sem.{name.removeprefix('/')}")
    assert semaphore.exists()
    other = multiprocessing.get_context("spawn").Lock()
    with owner(place):
        assert not semaphore.exists()
    assert Path("/dev/shm", f"sem.{vars(other)['_semlock'].name.removeprefix('/')}").exists()


def test_a_training_uses_nothing_else(place: Path) -> None:
    """multiprocessing's own directory is it too, for the sockets of the fork server."""
    code = "from multiprocessing import util; from paceline.launch.local.forkserver import prepare"
    code += "; prepare((), 1); print(util.get_temp_dir(), flush=True); import os; os._exit(0)"
    environment = os.environ | {"TMPDIR": str(place)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment, capture_output=True, text=True, check=True, timeout=patient(60),
    )  # fmt: skip
    used = Path(done.stdout.strip())
    assert used.parent.parent == place
    assert left_in(place) == {used.name, f"{used.name}.lock"}
    assert any(path.is_socket() for path in used.iterdir())


@pytest.fixture
def fresh(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """As if this process had no directory yet; what it is given is removed after the test."""
    finalizers = vars(util)["_finalizer_registry"]
    before = set(finalizers)
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(place))
        patch.setitem(vars(process.current_process())["_config"], "tempdir", None)
        yield place
        for key in finalizers.keys() - before:
            finalizers[key]()


def base_of(place: Path) -> Path:
    return place / f"paceline-{os.geteuid()}"


def open_to_others(base: Path) -> None:
    base.mkdir()
    base.chmod(0o777)


def a_link(base: Path) -> None:
    base.with_name("elsewhere").mkdir(mode=0o700)
    base.symlink_to("elsewhere")


def of_another(base: Path) -> None:
    base.mkdir(mode=0o700)
    os.chown(base, 12345, 12345)


def a_file(base: Path) -> None:
    base.touch()


PREPARED = [open_to_others, a_link, a_file, *([of_another] if os.geteuid() == 0 else [])]


@pytest.mark.parametrize("prepare", PREPARED)
def test_a_place_that_others_have_prepared_is_not_used(fresh: Path, prepare: object) -> None:
    assert callable(prepare)
    prepare(base_of(fresh))
    own = scratch.own_directory()
    assert own.parent == fresh
    assert own.stat().st_mode & 0o777 == 0o700
    assert own.stat().st_uid == os.geteuid()


def test_sockets_find_room_below_a_directory_with_a_long_name(
    tmp_path: Path, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("long" * 20)
    long.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(scratch, "_SHORT", str(fresh))
        patch.setattr(tempfile, "tempdir", str(long))
        assert scratch.own_directory().parent.parent == fresh


def test_odd_files_among_the_locks_are_left_alone(fresh: Path) -> None:
    base = base_of(fresh)
    base.mkdir(mode=0o700)
    kept = fresh / "kept"
    kept.mkdir()
    (kept / "file").touch()
    os.mkfifo(base / "a.lock")
    (base / "b.lock").symlink_to(kept / "file")
    (base / "c.lock").mkdir()
    (base / "d.lock").touch()
    (base / "d").symlink_to(kept)
    with scratch.scratch_directory() as made:
        assert made.parent.parent == base
    assert (kept / "file").exists()
    assert (base / "b.lock").is_symlink()


def test_a_lock_that_was_swept_away_meanwhile_is_none(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = base_of(fresh)
    base.mkdir(mode=0o700)
    take = fcntl.flock
    stolen: list[Path] = []

    def late(lock: int, how: int) -> None:
        if not stolen:
            stolen.extend(base.iterdir())
            stolen[0].unlink()
        take(lock, how)

    monkeypatch.setattr(fcntl, "flock", late)
    own = scratch.own_directory()
    assert own.parent == base
    assert stolen[0] != own.with_suffix(".lock")
    assert own.with_suffix(".lock").exists()
