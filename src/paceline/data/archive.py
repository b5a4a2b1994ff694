"""Data sets that come as one tar archive: found unpacked or packed, else downloaded and unpacked.

Nothing in an archive chooses where it goes: the files that are wanted are copied out under names
that stand in this package, and everything else is passed over.
"""

import gzip
import os
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from paceline.data.download import OpenUrl, RemoteFile, download_files, locked
from paceline.errors import DataError
from paceline.files import fsync_directory

_MOST_MEMBERS = 10_000
_MOST_BYTES = 1 << 34
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
    open_url: OpenUrl | None = None,
) -> Path:
    """Find a data set's files; unpack its archive, or download it, where they are missing.

    Every worker may call this at once: one of a node downloads and unpacks, the others wait.

    Args:
        wanted: The data set.
        data_dir: Holds the files, or `folder` with the files, or the archive.
        download: Whether a missing archive may be downloaded into `data_dir`.
        report: Told what is being downloaded or unpacked.
        open_url: Opens an address; the default speaks https only.

    Returns:
        The directory that holds all the files.

    Raises:
        DataError: They can't be had; names the files and says where to put them.
    """
    for folder in (data_dir / wanted.folder, data_dir):
        if not _missing(folder, wanted):
            return folder
    archive = data_dir / wanted.archive.name
    if not archive.is_file() and not download:
        target = data_dir / wanted.folder
        raise DataError(
            f"{wanted.title} is not complete in {target}: {', '.join(_missing(target, wanted))} "
            f"missing. Download {wanted.mirrors[0]}{wanted.archive.name} and put it into "
            f"{data_dir}, packed or unpacked, or allow the download"
        )
    if not archive.is_file():
        download_files(data_dir, [wanted.archive], wanted.mirrors, report=report, open_url=open_url)
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
        with locked(archive.parent):
            if _missing(target, wanted):
                report(f"unpacking {archive}")
                _unpack(wanted, archive, target)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise DataError(f"{archive}: the archive is damaged: {error}. {advice(wanted)}") from error
    except OSError as error:
        if error.errno is None:  # gzip's own: a wrong header or checksum
            raise DataError(
                f"{archive}: the archive is damaged: {error}. {advice(wanted)}"
            ) from error
        raise DataError(
            f"{archive} can't be unpacked ({error.strerror}). Unpack it by hand, so that "
            f"{target} holds {', '.join(wanted.files)}"
        ) from error


def _unpack(wanted: ArchivedSet, archive: Path, target: Path) -> None:
    """Copy the wanted files out to a temporary directory, then rename each: whole, or not there."""
    prefix = f".{wanted.folder}."
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
        if count >= _MOST_MEMBERS or total > _MOST_BYTES:
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
