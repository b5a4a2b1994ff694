"""Fetches data files and archives over https, once per node however many workers ask.

Nothing in an archive chooses where it goes: the files that are wanted are copied out under names
that stand in this package, and everything else is passed over.
"""

import fcntl
import gzip
import hashlib
import os
import shutil
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException, HTTPMessage, HTTPResponse
from pathlib import Path
from typing import IO, BinaryIO

from paceline.errors import DataError
from paceline.files import fsync_directory
from paceline.options.text import clause

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


def download_files(
    directory: Path,
    files: Sequence[RemoteFile],
    mirrors: Sequence[str],
    *,
    report: Callable[[str], None] = lambda text: None,
) -> None:
    """Fetch the files that the directory lacks; a file appears whole and verified, or not at all.

    Every worker may call this at once: a lock in the directory lets one of a node (with a shared
    file system: one of all) download while the others wait, who then find the files there.

    Args:
        directory: Made if need be.
        mirrors: Addresses under which each file's name is found, tried in this order.
        report: Told what is being downloaded, by the worker that downloads.

    Raises:
        DataError: No mirror gave a file, or the directory can't be written; says what to do.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with locked(directory):
            for file in files:
                if not (directory / file.name).exists():
                    _fetch_from_mirrors(directory, file, mirrors, report)
    except OSError as error:
        raise DataError(
            f"{directory} can't be written ({error.strerror}). "
            + _by_hand(directory, files, mirrors)
        ) from error


def open_https(url: str) -> HTTPResponse:
    """Open an https address; redirections to anything but https are refused.

    Raises:
        OSError: The address can't be reached, or isn't https.
    """
    if not url.startswith("https://"):
        raise urllib.error.URLError(f"not an https address: {url}")
    opener = urllib.request.build_opener(_HttpsOnly())
    opened: HTTPResponse = opener.open(url, timeout=_SILENCE_S)
    return opened


class _HttpsOnly(urllib.request.HTTPRedirectHandler):
    """Follows redirects to https addresses alone."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: object,
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        """Follow one redirect; an address that isn't https is an error."""
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
) -> None:
    failures = []
    for mirror in mirrors:
        url = mirror + file.name
        report(f"downloading {url} ({file.size_bytes / 1e6:.1f} MB)")
        try:
            with _opened(url) as stream:
                _store(directory / file.name, file, stream)
        except _TransferError as error:
            failures.append(f"{url}: {error}")
        else:
            return
    raise DataError(
        f"{file.name} could not be downloaded ({'; '.join(failures)}). "
        + _by_hand(directory, [file], mirrors)
    )


def _store(path: Path, file: RemoteFile, stream: HTTPResponse) -> None:
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


def _copy_verified(file: RemoteFile, stream: HTTPResponse, target: BinaryIO) -> None:
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
    # Size first: a truncated file is told from a changed one.
    if received < file.size_bytes:
        raise _TransferError(f"it ended after {received} of {file.size_bytes} bytes")
    if digest.hexdigest() != file.sha256:
        raise _TransferError("it is another file (its SHA-256 differs)")


def _read_chunk(stream: HTTPResponse) -> bytes:
    try:
        return stream.read(_CHUNK_BYTES)
    except (OSError, HTTPException) as error:
        raise _TransferError(f"the transfer broke off: {error}") from error


def _opened(url: str) -> HTTPResponse:
    try:
        return open_https(url)
    except (OSError, HTTPException) as error:
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


_MAX_MEMBERS = 10_000
_MAX_BYTES = 1 << 34
"""No archive may unpack to more than this (16 GiB)."""


@dataclass(frozen=True, kw_only=True)
class ArchivedSet:
    """A data set that its makers publish as one archive."""

    title: str
    """What users call it."""
    archive: RemoteFile
    mirrors: tuple[str, ...]
    folder: str
    """Where its files are, in the archive and (as torchvision has it) below the data directory."""
    files: tuple[str, ...]
    """Names of the files that are needed, in `folder`."""


def find_files(
    wanted: ArchivedSet,
    data_dir: Path,
    download: bool = True,
    *,
    report: Callable[[str], None] = lambda text: None,
) -> Path:
    """Find a data set's files; unpack its archive, or download it, where they are missing.

    Every worker may call this at once: one of a node downloads and unpacks, the others wait.

    Args:
        data_dir: Holds the files, or `folder` with the files, or the archive.
        download: Whether a missing archive may be downloaded into `data_dir`.
        report: Told what is being downloaded or unpacked.

    Returns:
        The directory that holds all the files.

    Raises:
        DataError: They can't be had; names the files and says where to put them.
    """
    # The files may lie unpacked in the folder of the archive or directly in the directory.
    for folder in (data_dir / wanted.folder, data_dir):
        if not _missing(folder, wanted):
            return folder
    # Unpack an archive that is there already; download it only where that is allowed.
    archive = data_dir / wanted.archive.name
    if not archive.is_file() and not download:
        target = data_dir / wanted.folder
        raise DataError(
            f"{wanted.title} is not complete in {target}: {', '.join(_missing(target, wanted))} "
            f"missing. Download {wanted.mirrors[0]}{wanted.archive.name} and put it into "
            f"{data_dir}, packed or unpacked, or allow the download"
        )
    if not archive.is_file():
        download_files(data_dir, [wanted.archive], wanted.mirrors, report=report)
    _unpack_once(wanted, archive, report)
    return data_dir / wanted.folder


def advice(wanted: ArchivedSet) -> str:
    """Say where a good copy comes from."""
    return f"Delete it and get it from {wanted.mirrors[0]}{wanted.archive.name}"


def _missing(folder: Path, wanted: ArchivedSet) -> list[str]:
    return [name for name in wanted.files if not (folder / name).is_file()]


def _unpack_once(wanted: ArchivedSet, archive: Path, report: Callable[[str], None]) -> None:
    """Unpack beside the archive, unless another worker has done so meanwhile."""
    target = archive.parent / wanted.folder
    try:
        # Several workers of a host share the directory: whoever waited looks again before
        # unpacking.
        with locked(archive.parent):
            if _missing(target, wanted):
                report(f"unpacking {archive}")
                _unpack(wanted, archive, target)
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        # An error without a number is gzip's own: a wrong header or checksum.
        if isinstance(error, OSError) and error.errno is not None:
            raise DataError(
                f"{archive} can't be unpacked ({error.strerror}). Unpack it by hand, so that "
                f"{target} holds {', '.join(wanted.files)}"
            ) from error
        raise DataError(
            f"{archive}: the archive is damaged: {clause(error)}. {advice(wanted)}"
        ) from error


def _unpack(wanted: ArchivedSet, archive: Path, target: Path) -> None:
    """Copy the wanted files out to a temporary directory, then rename each: whole, or not there."""
    prefix = f".{wanted.folder}."
    # Left by processes that were killed; the lock ensures that nobody is unpacking now.
    for left_behind in archive.parent.glob(f"{prefix}*"):
        shutil.rmtree(left_behind, ignore_errors=True)
    staging = Path(tempfile.mkdtemp(prefix=prefix, dir=archive.parent))
    try:
        names = {f"{wanted.folder}/{name}": name for name in wanted.files}
        with gzip.open(archive) as unzipped:
            with tarfile.open(fileobj=unzipped, mode="r|") as tar:
                _copy_wanted(tar, names, staging)
            while unzipped.read(1 << 20):  # to the end: only there gzip compares its checksum
                pass
        # Everything is checked in the temporary directory, before a file gets its final name.
        lacking = _missing(staging, wanted)
        if lacking:
            raise tarfile.TarError(f"it holds no {wanted.folder}/{lacking[0]}")
        target.mkdir(exist_ok=True)
        for name in wanted.files:
            (staging / name).replace(target / name)
        fsync_directory(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _copy_wanted(tar: tarfile.TarFile, wanted: dict[str, str], staging: Path) -> None:
    """Copy files out as they come by, within bounds."""
    total = 0
    for count, member in enumerate(tar):
        total += max(0, member.size)
        if count >= _MAX_MEMBERS or total > _MAX_BYTES:
            raise tarfile.TarError(f"it holds more than expected ({count + 1} entries)")
        name = wanted.get(member.name.removeprefix("./"))
        if name is None:
            continue
        if not member.isreg():
            raise tarfile.TarError(f"{member.name} is no regular file in it")
        stream = tar.extractfile(member)
        assert stream is not None  # a regular file
        _copy(stream, staging / name)


def _copy(stream: IO[bytes], path: Path) -> None:
    if path.exists():
        raise tarfile.TarError(f"it holds {path.name} twice")
    with path.open("xb") as target:
        shutil.copyfileobj(stream, target, 1 << 20)
        target.flush()
        os.fsync(target.fileno())
