import hashlib
import io
import multiprocessing
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from paceline.data.download import Readable, RemoteFile, download_files, open_https
from paceline.errors import DataError

CONTENT = b"some numbers" * 10_000
FILE = RemoteFile("numbers.gz", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
MIRRORS = ("https://one.example/", "https://two.example/")


class Broken(io.BytesIO):
    def read(self, size: int | None = -1, /) -> bytes:
        raise ConnectionResetError("reset by peer")


def serving(
    pages: dict[str, Callable[[], Readable]],
) -> Callable[[str], AbstractContextManager[Readable]]:
    def open_url(url: str) -> AbstractContextManager[Readable]:
        if url not in pages:
            raise OSError(f"nothing at {url}")
        return nullcontext(pages[url]())

    return open_url


def good() -> Readable:
    return io.BytesIO(CONTENT)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_downloads_what_is_missing(tmp_path: Path) -> None:
    told: list[str] = []
    open_url = serving({MIRRORS[0] + FILE.name: good})
    target = tmp_path / "a" / "b"
    download_files(target, [FILE], MIRRORS, report=told.append, open_url=open_url)
    assert (target / FILE.name).read_bytes() == CONTENT
    assert names(target) == [".download.lock", FILE.name]
    assert told == ["downloading https://one.example/numbers.gz (0.1 MB)"]
    download_files(target, [FILE], MIRRORS, report=told.append, open_url=serving({}))
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
    tmp_path: Path, page: Callable[[], Readable], message: str
) -> None:
    bad, fine = (mirror + FILE.name for mirror in MIRRORS)
    download_files(tmp_path, [FILE], MIRRORS, open_url=serving({bad: page, fine: good}))
    assert (tmp_path / FILE.name).read_bytes() == CONTENT
    (tmp_path / FILE.name).unlink()
    with pytest.raises(DataError, match=f"one.example.*{message}.*nothing at.*By hand: download"):
        download_files(tmp_path, [FILE], MIRRORS, open_url=serving({bad: page}))
    assert names(tmp_path) == [".download.lock"]


def test_only_https(tmp_path: Path) -> None:
    for url in ("http://one.example/", "file:///etc/hostname", "ftp://one.example/"):
        with pytest.raises(OSError, match="not an https address"):
            open_https(url)


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"can't be written \(Not a directory\).*By hand: download"):
        download_files(tmp_path / "file" / "below", [FILE], MIRRORS, open_url=serving({}))


def _download_slowly(directory: Path, begun: int, go_on: int, counter: Path) -> None:
    def open_url(url: str) -> AbstractContextManager[Readable]:
        with counter.open("a") as file:
            file.write(f"{os.getpid()}\n")
        os.write(begun, b".")
        os.read(go_on, 1)
        return nullcontext(io.BytesIO(CONTENT))

    download_files(directory, [FILE], MIRRORS, open_url=open_url)
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
