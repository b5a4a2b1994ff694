import hashlib
import io
import os
import tarfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from paceline.data.archive import ArchivedSet, find_files
from paceline.data.download import RemoteFile
from paceline.errors import DataError

Entry = tuple[tarfile.TarInfo, bytes]


def entry(name: str, content: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = "") -> Entry:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, len(content)
    return info, content


GOOD = [entry("set", kind=tarfile.DIRTYPE), entry("set/a", b"AAA"), entry("./set/b", b"BB")]


def make_archive(path: Path, entries: list[Entry]) -> bytes:
    with tarfile.open(path, "w:gz") as tar:
        for info, content in entries:
            tar.addfile(info, io.BytesIO(content))
    return path.read_bytes()


def published(content: bytes = b"") -> ArchivedSet:
    return ArchivedSet(
        title="The set",
        archive=RemoteFile("set.tar.gz", len(content), hashlib.sha256(content).hexdigest()),
        mirrors=("https://one.example/",),
        folder="set",
        files=("a", "b"),
    )


def tree(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def test_downloads_and_unpacks(tmp_path: Path) -> None:
    content = make_archive(tmp_path / "made", GOOD)
    told: list[str] = []
    data = tmp_path / "data"
    found = find_files(
        published(content),
        data,
        report=told.append,
        open_url=lambda _: nullcontext(io.BytesIO(content)),
    )
    assert ((found / "a").read_bytes(), (found / "b").read_bytes()) == (b"AAA", b"BB")
    assert tree(data) == [".download.lock", "set", "set.tar.gz", "set/a", "set/b"]
    assert [line.split()[0] for line in told] == ["downloading", "unpacking"]
    assert find_files(published(), data, download=False) == data / "set"


def test_only_what_is_wanted_is_written(tmp_path: Path) -> None:
    hostile = [
        entry("/etc/hostile", b"x"),
        entry("../outside", b"x"),
        entry("set/../../outside", b"x"),
        entry("set/link", kind=tarfile.SYMTYPE, link="/etc"),
        entry("set/link/x", b"x"),
        entry("set/device", kind=tarfile.CHRTYPE),
        entry("set/more", b"x"),
    ]
    (tmp_path / "data").mkdir()
    make_archive(tmp_path / "data" / "set.tar.gz", hostile + GOOD)
    find_files(published(), tmp_path / "data", download=False)
    wanted = ["data", "data/.download.lock", "data/set", "data/set.tar.gz", "data/set/a"]
    assert tree(tmp_path) == [*wanted, "data/set/b"]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([*GOOD[:2]], "it holds no set/b"),
        ([*GOOD, entry("set/a", b"again")], "it holds a twice"),
        ([GOOD[1], entry("set/b", kind=tarfile.SYMTYPE, link="a")], "set/b is no regular file"),
        ([GOOD[1], entry("set/b", kind=tarfile.LNKTYPE, link="/etc/passwd")], "no regular file"),
        ([entry(str(number)) for number in range(10_001)], "more than expected"),
    ],
)
@pytest.mark.core_cases(2)
def test_archives_that_do_not_fit(tmp_path: Path, entries: list[Entry], message: str) -> None:
    make_archive(tmp_path / "set.tar.gz", entries)
    with pytest.raises(DataError, match=f"set.tar.gz: the archive is damaged: .*{message}.*Delete"):
        find_files(published(), tmp_path)
    assert tree(tmp_path) == [".download.lock", "set.tar.gz"]


def _cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _wrong_checksum(content: bytes) -> bytes:
    return content[:-8] + bytes([content[-8] ^ 1]) + content[-7:]


@pytest.mark.parametrize("damage", [_cut, _wrong_checksum, lambda _: b"", lambda _: b"no archive"])
def test_damaged_archives(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    content = make_archive(tmp_path / "set.tar.gz", [*GOOD, entry("set/rest", os.urandom(9000))])
    (tmp_path / "set.tar.gz").write_bytes(damage(content))
    with pytest.raises(DataError, match=r"set.tar.gz: the archive is damaged: .*Delete it and get"):
        find_files(published(), tmp_path)
    assert tree(tmp_path) == [".download.lock", "set.tar.gz"]


def test_what_a_killed_worker_left_is_removed(tmp_path: Path) -> None:
    make_archive(tmp_path / "set.tar.gz", GOOD)
    (tmp_path / ".set.x1").mkdir()
    (tmp_path / ".set.x1" / "a").write_bytes(b"half")
    find_files(published(), tmp_path)
    assert tree(tmp_path) == [".download.lock", "set", "set.tar.gz", "set/a", "set/b"]
