import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.checkpoint.file_writer import write_file


def content_of(size: int, fill: int) -> bytes:
    return bytes((fill + i) % 251 for i in range(size))


def needs_a_disk(path: Path) -> None:
    if os.major(path.stat().st_dev) == 0:
        pytest.skip("needs a file system on a disk of this host")


@contextlib.contextmanager
def held(path: Path, how: str) -> Iterator[None]:
    """Have hold of a file, as a reader or a backup has."""
    if how == "linked":
        path.with_name("link").hardlink_to(path)
        yield
        return
    with path.open("r+b" if how == "open for writing" else "rb") as file:
        if how != "mapped":
            yield
            return
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with mapped:
        yield


@pytest.mark.parametrize("before", [0, 1, 5_000, 200_000, 8_192])
@pytest.mark.parametrize("after", [0, 1, 8_192, 100_000])
def test_the_new_content_is_all_there_is(tmp_path: Path, before: int, after: int) -> None:
    path, new = tmp_path / "file", content_of(after, 7)
    write_file(path, [memoryview(content_of(before, 0))])
    entry = write_file(path, [memoryview(new)], over=True)
    assert path.read_bytes() == new
    assert (entry.bytes, entry.sha256) == (after, hashlib.sha256(new).hexdigest())


def test_a_file_that_nobody_has_hold_of_is_written_over(tmp_path: Path) -> None:
    needs_a_disk(tmp_path)
    path = tmp_path / "file"
    write_file(path, [memoryview(b"old")])
    with path.open("rb"):
        pass
    old = os.open(path, os.O_PATH)  # no hold on the content, but its number isn't given again
    write_file(path, [memoryview(b"newer")], over=True)
    assert path.read_bytes() == b"newer"
    assert os.fstat(old).st_ino == path.stat().st_ino
    os.close(old)


@pytest.mark.parametrize("how", ["linked", "open for reading", "open for writing", "mapped"])
def test_who_has_hold_of_the_old_file_keeps_it(tmp_path: Path, how: str) -> None:
    path = tmp_path / "file"
    write_file(path, [memoryview(b"old content")])
    old = os.open(path, os.O_PATH)
    with held(path, how):
        write_file(path, [memoryview(b"new")], over=True)
        assert Path(f"/proc/self/fd/{old}").read_bytes() == b"old content"
        assert path.read_bytes() == b"new"
    os.close(old)


def test_a_link_is_replaced_and_its_target_left_alone(tmp_path: Path) -> None:
    path, target = tmp_path / "file", tmp_path / "target"
    target.write_bytes(b"target")
    path.symlink_to(target)
    write_file(path, [memoryview(b"new")], over=True)
    assert not path.is_symlink()
    assert (path.read_bytes(), target.read_bytes()) == (b"new", b"target")


def test_a_file_that_is_gone_is_made_anew(tmp_path: Path) -> None:
    write_file(tmp_path / "file", [memoryview(b"new")], over=True)
    assert (tmp_path / "file").read_bytes() == b"new"


def test_without_being_asked_nothing_is_written_over(tmp_path: Path) -> None:
    write_file(tmp_path / "file", [memoryview(b"old")])
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "file", [memoryview(b"new")])
    assert (tmp_path / "file").read_bytes() == b"old"


def test_where_the_host_cant_tell_who_has_hold_of_it_the_file_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = fcntl.fcntl

    def without_leases(descriptor: int, command: int, value: int = 0) -> int:
        if command == fcntl.F_SETLEASE:
            raise OSError(errno.EINVAL, "Invalid argument")
        return control(descriptor, command, value)

    path = tmp_path / "file"
    write_file(path, [memoryview(b"old")])
    with path.open("rb") as reader:
        monkeypatch.setattr(fcntl, "fcntl", without_leases)
        write_file(path, [memoryview(b"new")], over=True)
        assert (reader.read(), path.read_bytes()) == (b"old", b"new")
