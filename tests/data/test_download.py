import hashlib
import io
import multiprocessing
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.data import download
from paceline.data.download import (
    ArchivedSet,
    RemoteFile,
    download_files,
    find_files,
    open_https,
)
from paceline.errors import DataError

CONTENT = b"some numbers" * 10_000
FILE = RemoteFile("numbers.gz", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
MIRRORS = ("https://one.example/", "https://two.example/")


class Broken(io.BytesIO):
    def read(self, size: int | None = -1, /) -> bytes:
        raise ConnectionResetError("reset by peer")


Page = Callable[[], io.BytesIO]
Serve = Callable[[dict[str, Page]], None]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    def serving(pages: dict[str, Page]) -> None:
        def open_url(url: str) -> io.BytesIO:
            if url not in pages:
                raise OSError(f"nothing at {url}")
            return pages[url]()

        monkeypatch.setattr(download, "open_https", open_url)

    return serving


def good() -> io.BytesIO:
    return io.BytesIO(CONTENT)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_downloads_what_is_missing(tmp_path: Path, serve: Serve) -> None:
    told: list[str] = []
    serve({MIRRORS[0] + FILE.name: good})
    target = tmp_path / "a" / "b"
    download_files(target, [FILE], MIRRORS, report=told.append)
    assert (target / FILE.name).read_bytes() == CONTENT
    assert names(target) == [".download.lock", FILE.name]
    assert told == ["downloading https://one.example/numbers.gz (0.1 MB)"]
    serve({})
    download_files(target, [FILE], MIRRORS, report=told.append)
    assert len(told) == 1


@pytest.mark.parametrize(
    ("page", "message"),
    [
        (lambda: io.BytesIO(CONTENT[:-1]), f"ended after {len(CONTENT) - 1} of {len(CONTENT)}"),
        (lambda: io.BytesIO(CONTENT + b"x"), f"longer than the expected {len(CONTENT)} bytes"),
        (lambda: io.BytesIO(CONTENT.replace(b"s", b"S")), "another file"),
        (Broken, "the transfer broke off: reset by peer"),
    ],
)
def test_a_bad_mirror_is_passed_over(
    tmp_path: Path, serve: Serve, page: Page, message: str
) -> None:
    bad, fine = (mirror + FILE.name for mirror in MIRRORS)
    serve({bad: page, fine: good})
    download_files(tmp_path, [FILE], MIRRORS)
    assert (tmp_path / FILE.name).read_bytes() == CONTENT
    (tmp_path / FILE.name).unlink()
    serve({bad: page})
    with pytest.raises(DataError, match=f"one.example.*{message}.*nothing at.*By hand: download"):
        download_files(tmp_path, [FILE], MIRRORS)
    assert names(tmp_path) == [".download.lock"]


def test_only_https(tmp_path: Path) -> None:
    for url in ("http://one.example/", "file:///etc/hostname", "ftp://one.example/"):
        with pytest.raises(OSError, match="not an https address"):
            open_https(url)


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"can't be written \(Not a directory\).*By hand: download"):
        download_files(tmp_path / "file" / "below", [FILE], MIRRORS)


def _download_slowly(directory: Path, begun: int, go_on: int, counter: Path) -> None:
    def open_url(url: str) -> io.BytesIO:
        with counter.open("a") as file:
            file.write(f"{os.getpid()}\n")
        os.write(begun, b".")
        os.read(go_on, 1)
        return io.BytesIO(CONTENT)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(download, "open_https", open_url)
        download_files(directory, [FILE], MIRRORS)
    assert (directory / FILE.name).read_bytes() == CONTENT


def test_one_of_several_processes_downloads(tmp_path: Path) -> None:
    """The others come while the first one downloads; they find its file when it is done."""
    begun, told = os.pipe()
    go_on, let_go = os.pipe()
    counter = tmp_path / "counter"
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_download_slowly, args=(tmp_path / "data", told, go_on, counter))
        for _ in range(3)
    ]
    for process in processes:
        process.start()
    assert os.read(begun, 1) == b"."
    os.write(let_go, b"...")
    for process in processes:
        process.join(30)
    for descriptor in (begun, told, go_on, let_go):
        os.close(descriptor)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len(counter.read_text().splitlines()) == 1


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


def test_downloads_and_unpacks(tmp_path: Path, serve: Serve) -> None:
    content = make_archive(tmp_path / "made", GOOD)
    told: list[str] = []
    data = tmp_path / "data"
    serve({"https://one.example/set.tar.gz": lambda: io.BytesIO(content)})
    found = find_files(published(content), data, report=told.append)
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
