import errno
import math
import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from paceline.errors import StorageError, UsageError
from paceline.files import (
    read_json,
    read_json_object,
    read_plain,
    storing,
    why_unreadable,
    write_atomic,
    write_json,
    writing,
)


def test_the_new_content_replaces_the_old(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in (b"old", b"", b"new"):
        write_atomic(path, content)
        assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("failing", ["fsync", "write"])
def test_a_failure_keeps_the_old_content_and_leaves_nothing(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail(*ignored: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        if failing == "fsync":
            patched.setattr(os, "fsync", fail)
        else:
            patched.setattr(Path, "replace", fail)
        with pytest.raises(OSError, match="No space left"):
            write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_content_is_durable_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def note_fsync(descriptor: int) -> None:
        done.append("directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def note_rename(path: Path, target: Path) -> Path:
        done.append("rename")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "replace", note_rename)
    write_atomic(tmp_path / "file", b"content")
    assert done == ["file", "rename", "directory"]


def test_json_that_isnt_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    write_json(path, {"a": [1, None]})
    before = path.read_text()
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"a": math.nan})
    assert path.read_text() == before
    assert before.endswith("\n")


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC])
def test_what_cannot_be_written_is_named(tmp_path: Path, number: int) -> None:
    words = f"{tmp_path} can't be written: {os.strerror(number)}"
    with pytest.raises(StorageError, match=words), storing(tmp_path):
        raise OSError(number, os.strerror(number))
    with pytest.raises(StorageError, match=words), storing(Path("elsewhere")):
        raise OSError(number, os.strerror(number), str(tmp_path))


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.EROFS, UsageError),
        (errno.EACCES, UsageError),
        (errno.ENOENT, UsageError),
        (errno.ENOTDIR, UsageError),
        (errno.EISDIR, UsageError),
        (errno.ENOSPC, StorageError),
        (errno.EDQUOT, StorageError),
        (errno.EIO, StorageError),
    ],
)
def test_a_wrong_place_is_the_users_fault_and_a_full_disk_is_not(
    number: int, kind: type[Exception]
) -> None:
    words = f"^mine can't be written: {os.strerror(number)}"
    with pytest.raises(kind, match=words), writing(Path("mine"), hint="Make room"):
        raise OSError(number, os.strerror(number), ".mine.1234")


def test_other_errors_are_none_of_the_disks(tmp_path: Path) -> None:
    with pytest.raises(ConnectionResetError), storing(tmp_path):
        raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
    with pytest.raises(ConnectionResetError), writing(tmp_path):
        raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")


@pytest.fixture
def no_hang() -> Iterator[None]:
    """Ends the test where a reader waits for what never comes."""

    def late(number: int, frame: FrameType | None) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("no_hang")
def test_only_plain_files_of_a_sensible_size_are_read(tmp_path: Path) -> None:
    pipe, large, link = tmp_path / "pipe", tmp_path / "large", tmp_path / "link"
    os.mkfifo(pipe)
    large.write_bytes(b"x" * 11)
    link.symlink_to(large)
    for path, told in (
        (pipe, "a named pipe, not a plain file"),
        (Path("/dev/zero"), "a device, not a plain file"),
        (tmp_path, "a directory, not a plain file"),
        (large, "larger than 10 bytes"),
    ):
        with pytest.raises(ValueError, match=told):
            read_plain(path, 10)
    assert read_plain(large, 11) == read_plain(link, 11) == b"x" * 11
    with pytest.raises(FileNotFoundError):
        read_plain(tmp_path / "none")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting property name"),
        (b'"\xff"', "utf-8"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b"[" * 100_000 + b"]" * 100_000, "nested more than 100 deep"),
        (b'{"a":' * 102 + b"1" + b"}" * 102, "nested more than 100 deep"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', 'names "c" twice'),
        (b"[NaN]", "NaN is no number"),
        (b"[-Infinity]", "-Infinity is no number"),
        (b"1e999", "too large"),
        (b"[" + b"9" * 5000 + b"]", "has 5,000 digits"),
        (b"0." + b"9" * 5000, "too long"),
    ],
)
def test_json_that_is_none(text: bytes, told: str, tmp_path: Path) -> None:
    path = tmp_path / "it.json"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=told):
        read_json(path)


def test_json_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "it.json"
    content = {"a": [1, -2.5e300, None, True, "\udcff\n"], "b": {"c": {}}, "n": 2**63}
    write_json(path, content)
    assert read_json_object(path) == content
    write_json(path, [1])
    with pytest.raises(ValueError, match="should hold a JSON object, not a list"):
        read_json_object(path)


def test_why_a_file_is_unreadable_leaves_out_its_path(tmp_path: Path) -> None:
    assert why_unreadable(OSError(errno.EACCES, "Permission denied", "/x")) == "Permission denied"
    with pytest.raises(ValueError, match="utf-8") as caught:
        b"ab\xff".decode()
    assert why_unreadable(caught.value) == "it isn't UTF-8 (byte 2)"
