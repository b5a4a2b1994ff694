import errno
import math
import os
import stat
from pathlib import Path

import pytest

from paceline.config.files import storing, write_atomic, write_json
from paceline.errors import StorageError


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


def test_other_errors_are_none_of_the_disks(tmp_path: Path) -> None:
    with pytest.raises(ConnectionResetError), storing(tmp_path):
        raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
