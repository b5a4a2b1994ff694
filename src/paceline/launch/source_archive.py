"""The working tree as one archive: what git knows and doesn't ignore, or all that isn't hidden."""

import gzip
import io
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from paceline.errors import UsageError

MAX_BYTES = 500 * 2**20
_LISTING_S = 60.0
_NEVER = frozenset({"runs", "__pycache__", "node_modules"})
_SECRET = frozenset({".env", ".netrc", ".pypirc", ".git-credentials"})
_SECRET_ENDINGS = frozenset({".pem", ".key", ".p12"})


def code_files(directory: Path) -> list[PurePosixPath]:
    """List the files of the code, relative to its directory, in order.

    Left out are run directories, and what usually holds secrets (`.env`, keys).

    Args:
        directory: In a git repository, what git ignores isn't listed; else nothing hidden is.
    """
    known = _known_to_git(directory)
    listed = _all_below(directory) if known is None else known
    return sorted({path for path in listed if _is_code(path) and (directory / path).is_file()})


def pack(directory: Path, files: Sequence[PurePosixPath]) -> bytes:
    """Pack files into a tar.gz; the same files give the same bytes. Links become what they name.

    Raises:
        UsageError: They are too much for code.
    """
    packed = io.BytesIO()
    # no times in it: the same code is the same archive
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as file,
        tarfile.open(fileobj=file, mode="w", dereference=True) as archive,
    ):
        for path in files:
            archive.add(directory / path, arcname=str(path), recursive=False, filter=_plain)
            if packed.tell() > MAX_BYTES:
                raise UsageError(_too_much(directory, files))
    return packed.getvalue()


def _known_to_git(directory: Path) -> list[PurePosixPath] | None:
    """List what git tracks or would track; None where there is no git or no repository."""
    try:
        done = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=directory,
            capture_output=True,
            timeout=_LISTING_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    names = done.stdout.decode(errors="surrogateescape").split("\0")
    return [PurePosixPath(name) for name in names if name]


def _all_below(directory: Path) -> Iterator[PurePosixPath]:
    for path in directory.iterdir():
        if path.name.startswith(".") or path.name in _NEVER:
            continue
        if path.is_dir() and not path.is_symlink():
            if not (path / "pyvenv.cfg").exists():
                yield from (PurePosixPath(path.name) / inner for inner in _all_below(path))
        else:
            yield PurePosixPath(path.name)


def _is_code(path: PurePosixPath) -> bool:
    is_secret = path.name in _SECRET or path.suffix in _SECRET_ENDINGS
    return path.parts[0] != "runs" and not is_secret


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


def _too_much(directory: Path, files: Sequence[PurePosixPath]) -> str:
    sizes = sorted(((directory / path).stat().st_size, str(path)) for path in files)
    largest = ", ".join(f"{path} ({size / 2**20:.0f} MB)" for size, path in sizes[:-4:-1])
    return (
        f"the code in {directory} is more than {MAX_BYTES // 2**20} MB: {largest}. Have git "
        "ignore data, and put it into S3"
    )
