"""Fetches data files over https, once per node however many workers ask, and checks what came."""

import fcntl
import hashlib
import http.client
import os
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from paceline.errors import DataError
from paceline.files import fsync_directory

_CHUNK_BYTES = 1 << 16
_SILENCE_S = 30.0
"""A server that sends nothing for so long is given up."""
_FILE_S = 1800.0
"""A file that takes longer than this is given up: the other workers are waiting for it."""


@dataclass(frozen=True)
class RemoteFile:
    """A file that has to be exactly this one."""

    name: str
    size_bytes: int
    sha256: str


class Readable(Protocol):
    """What an opened address gives."""

    def read(self, size: int, /) -> bytes:
        """Give at most `size` bytes; none at the end."""


OpenUrl = Callable[[str], AbstractContextManager[Readable]]


def download_files(
    directory: Path,
    files: Sequence[RemoteFile],
    mirrors: Sequence[str],
    *,
    report: Callable[[str], None] = lambda text: None,
    open_url: OpenUrl | None = None,
) -> None:
    """Fetch the files that the directory lacks; a file appears whole and verified, or not at all.

    Every worker may call this at once: a lock in the directory lets one of a node (with a shared
    file system: one of all) download while the others wait, who then find the files there.

    Args:
        directory: Made if need be.
        files: What must be there in the end.
        mirrors: Addresses under which each file's name is found, tried in this order.
        report: Told what is being downloaded, by the worker that downloads.
        open_url: Opens an address; the default speaks https only.

    Raises:
        DataError: No mirror gave a file, or the directory can't be written; says what to do.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with locked(directory):
            for file in files:
                if not (directory / file.name).exists():
                    _fetch_from_mirrors(directory, file, mirrors, report, open_url or open_https)
    except OSError as error:
        raise DataError(
            f"{directory} can't be written ({error.strerror}). "
            + _by_hand(directory, files, mirrors)
        ) from error


def open_https(url: str) -> AbstractContextManager[Readable]:
    """Open an https address; redirections to anything but https are refused.

    Raises:
        OSError: The address can't be reached, or isn't https.
    """
    if not url.startswith("https://"):
        raise urllib.error.URLError(f"not an https address: {url}")
    opener = urllib.request.build_opener(_HttpsOnly())
    opened: AbstractContextManager[Readable] = opener.open(url, timeout=_SILENCE_S)
    return opened


class _HttpsOnly(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: object,
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        if not newurl.startswith("https://"):
            raise urllib.error.URLError(f"redirected to an address that is not https: {newurl}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]


class _TransferError(Exception):
    """A mirror didn't give the file; the next one may."""


def _fetch_from_mirrors(
    directory: Path,
    file: RemoteFile,
    mirrors: Sequence[str],
    report: Callable[[str], None],
    open_url: OpenUrl,
) -> None:
    failures = []
    for mirror in mirrors:
        url = mirror + file.name
        report(f"downloading {url} ({file.size_bytes / 1e6:.1f} MB)")
        try:
            with _opened(url, open_url) as stream:
                _store(directory / file.name, file, stream)
        except _TransferError as error:
            failures.append(f"{url}: {error}")
        else:
            return
    raise DataError(
        f"{file.name} could not be downloaded ({'; '.join(failures)}). "
        + _by_hand(directory, [file], mirrors)
    )


def _store(path: Path, file: RemoteFile, stream: Readable) -> None:
    """Write what comes to a temporary file, and rename that once it proves to be the right one."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as target:
            _copy_verified(file, stream, target)
            target.flush()
            os.fsync(target.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
        fsync_directory(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _copy_verified(file: RemoteFile, stream: Readable, target: BinaryIO) -> None:
    digest = hashlib.sha256()
    received = 0
    give_up_at = time.monotonic() + _FILE_S
    while chunk := _read_chunk(stream):
        received += len(chunk)
        if received > file.size_bytes:
            raise _TransferError(f"it is longer than the expected {file.size_bytes} bytes")
        if time.monotonic() > give_up_at:
            raise _TransferError(f"only {received} bytes came within {_FILE_S:.0f} s")
        digest.update(chunk)
        target.write(chunk)
    if received < file.size_bytes:
        raise _TransferError(f"it ended after {received} of {file.size_bytes} bytes")
    if digest.hexdigest() != file.sha256:
        raise _TransferError("it is another file (its SHA-256 differs)")


def _read_chunk(stream: Readable) -> bytes:
    try:
        return stream.read(_CHUNK_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise _TransferError(f"the transfer broke off: {error}") from error


def _opened(url: str, open_url: OpenUrl) -> AbstractContextManager[Readable]:
    try:
        return open_url(url)
    except (OSError, http.client.HTTPException) as error:
        raise _TransferError(str(error)) from error


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the directory's lock; the kernel frees it when its holder dies.

    Raises:
        OSError: The directory can't be written.
    """
    descriptor = os.open(directory / ".download.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _by_hand(directory: Path, files: Sequence[RemoteFile], mirrors: Sequence[str]) -> str:
    addresses = ", ".join(mirrors[0] + file.name for file in files)
    return f"By hand: download {addresses} and put it into {directory}"
