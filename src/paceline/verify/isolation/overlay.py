"""A copy-on-write view of the file system, kept in a directory that all ranks of a launch share.

What is written goes to `files/`, under its own absolute path; what is removed leaves a mark in
`gone/`. Reading looks there first, and then in the real file system, which nothing here changes.
"""

import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import final

AnyPath = str | bytes | os.PathLike[str] | os.PathLike[bytes]

_MAX_LINKS = 40
_COPIED_UNASKED = 1 << 30
"""Files above this size are copied only where that leaves half of the free space."""


@final
class Overlay:
    """Says where a file is to be read and written. Paths become keys: absolute, links resolved."""

    def __init__(self, directory: Path, passed: Sequence[Path]) -> None:
        """Create the overlay.

        Args:
            directory: For what is written; made when something is.
            passed: Directories below which everything is left as it is.
        """
        top = os.path.realpath(directory)
        self._files = os.path.join(top, "files")
        self._gone = os.path.join(top, "gone")
        self._passed = tuple(os.path.realpath(path) + os.sep for path in passed)
        self._is_used = False

    def is_used(self) -> bool:
        """Tell whether any rank has written anything."""
        self._is_used = self._is_used or os.path.exists(self._files)
        return self._is_used

    def key(self, path: AnyPath, *, follow: bool, base: str = "") -> str | None:
        """Give a path's key; None where the path isn't redirected.

        Args:
            path: As the script gives it.
            follow: Whether a symbolic link at its end is followed.
            base: What it is relative to; the working directory by default.
        """
        full = os.path.join(base or os.getcwd(), os.fsdecode(path)).rstrip(os.sep) or os.sep
        # Links are followed one at a time, since a link may lie in the overlay and lead out of it.
        for _ in range(_MAX_LINKS):
            key = self._resolved(full)
            if key.startswith(self._passed):
                return None
            seen = self.visible(key) if follow else None
            if seen is None or not os.path.islink(seen):
                return key
            full = os.path.join(os.path.dirname(key), os.readlink(seen))
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fsdecode(path))

    def visible(self, key: str) -> str | None:
        """Give where a key's file is now; None where there is none."""
        above = self._files + key
        if os.path.lexists(above):
            return above
        return key if os.path.lexists(key) and not self._is_gone(key) else None

    def readable(self, key: str, *, real: bool = False) -> str:
        """Give where to read; a path that isn't there where the file isn't.

        Args:
            key: Of a file or a directory.
            real: Prefer the real one, where it wasn't removed.
        """
        if real and os.path.lexists(key) and not self._is_gone(key):
            return key
        return self.visible(key) or self._files + key

    def real_name(self, path: str) -> str:
        """Give the script's own name of a path in here."""
        return path.removeprefix(self._files) if path.startswith(self._files + os.sep) else path

    def writable(self, key: str, *, keep: bool) -> str:
        """Give where to write, with what the file holds now.

        Args:
            key: Of a file or a directory.
            keep: Whether what it holds is needed; otherwise it is about to be replaced.

        Raises:
            OSError: The real file couldn't be written either.
        """
        # Written already, by any rank: there is a copy.
        above, seen = self._files + key, self.visible(key)
        if seen == above:
            return above
        if seen is not None and not os.path.isdir(seen) and not os.path.isfile(seen):
            return seen  # a pipe or a device
        # The first write: refuse what the real file system would, then copy.
        self._check(seen or os.path.dirname(key), key)
        if seen is not None and os.path.isdir(seen):
            os.makedirs(above, exist_ok=True)
            return above
        self._make_parent(key)
        if seen is not None and keep:
            self._copy(seen, above)
        return above

    def place_of_new(self, key: str) -> str:
        """Give where to make something that isn't there yet.

        Raises:
            OSError: It is there, its directory isn't, or that couldn't be written.
        """
        if self.visible(key) is not None:
            raise _error(errno.EEXIST, key)
        self._check(os.path.dirname(key), key)
        self._make_parent(key)
        return self._files + key

    def names(self, key: str) -> list[str]:
        """List a directory."""
        above, found = self._files + key, dict[str, None]()
        if os.path.isdir(above):
            found |= dict.fromkeys(os.listdir(above))
        elif not os.path.isdir(key) or self._is_gone(key):
            return os.listdir(above)  # raises what there is to raise
        # The real entries, without those that were removed.
        if os.path.isdir(key) and not self._is_gone(key):
            below = (
                name for name in os.listdir(key) if not self._is_marked(os.path.join(key, name))
            )
            found |= dict.fromkeys(below)
        return list(found)

    def remove(self, key: str, *, directory: bool) -> None:
        """Remove a file, or an empty directory.

        Raises:
            OSError: As `os.unlink` and `os.rmdir` would.
        """
        seen = self.visible(key)
        if seen is None:
            raise _error(errno.ENOENT, key)
        is_directory = os.path.isdir(seen) and not os.path.islink(seen)
        if is_directory != directory:
            raise _error(errno.EISDIR if is_directory else errno.ENOTDIR, key)
        if directory and self.names(key):
            raise _error(errno.ENOTEMPTY, key)
        self._check(os.path.dirname(key), key)
        self._drop(key)

    def lift(self, key: str) -> str:
        """Copy a file, or a directory with all below it, and give where it is then."""
        seen = self.visible(key)
        if seen is None:
            raise _error(errno.ENOENT, key)
        # A link is copied as a link, a directory with all below it.
        if os.path.islink(seen):
            if seen != self._files + key:
                self._make_parent(key)
                os.symlink(os.readlink(seen), self._files + key)
            return self._files + key
        place = self.writable(key, keep=True)
        if os.path.isdir(seen):
            for name in self.names(key):
                self.lift(os.path.join(key, name))
        return place

    def make_way(self, key: str) -> str:
        """Give where something is to be moved, and empty the place of a directory."""
        seen = self.visible(key)
        if seen is None:
            return self.place_of_new(key)
        # As rename(2): a directory may be replaced only where it is empty.
        if os.path.isdir(seen) and not os.path.islink(seen):
            if self.names(key):
                raise _error(errno.ENOTEMPTY, key)
            self._drop(key)
        self._check(os.path.dirname(key), key)
        self._make_parent(key)
        return self._files + key

    def moved_away(self, key: str) -> None:
        """Note that what was at a key has been moved."""
        if os.path.lexists(key):
            self._mark(key)

    def _resolved(self, full: str) -> str:
        full = self.real_name(full)
        # The last name stays as it is: `realpath` would follow it if it is a link.
        parent, name = os.path.split(full)
        if name in ("", ".", ".."):
            return self.real_name(os.path.realpath(full))
        return os.path.join(self.real_name(os.path.realpath(parent)), name)

    def _drop(self, key: str) -> None:
        above = self._files + key
        if os.path.isdir(above) and not os.path.islink(above):
            os.rmdir(above)
        elif os.path.lexists(above):
            os.unlink(above)
        self.moved_away(key)

    def _check(self, seen: str, key: str) -> None:
        """Refuse what the real file system would refuse."""
        place = seen if seen.startswith(self._files) else self.readable(seen)
        if not os.path.lexists(place):
            raise _error(errno.ENOENT, key)
        if not os.access(place, os.W_OK):
            raise _error(errno.EACCES, key)

    def _make_parent(self, key: str) -> None:
        parent = os.path.dirname(key)
        seen = self.visible(parent)
        if seen is None or not os.path.isdir(seen):
            raise _error(errno.ENOENT if seen is None else errno.ENOTDIR, key)
        os.makedirs(self._files + parent, exist_ok=True)

    def _copy(self, source: str, place: str) -> None:
        size, free = os.stat(source).st_size, shutil.disk_usage(self._files).free
        if size > _COPIED_UNASKED and size > free / 2:
            raise OSError(
                errno.ENOSPC,
                f"paceline verify lets a script change copies of files only, and this one "
                f"({size:,} bytes) is too large to be copied: open it for reading",
                source,
            )
        # Copied under a name of its own and renamed: other ranks see a whole file or none.
        temporary = f"{place}.{os.getpid()}"
        shutil.copy2(source, temporary)
        os.chmod(temporary, stat.S_IMODE(os.stat(temporary).st_mode) | stat.S_IWUSR)
        os.replace(temporary, place)  # another rank may be at it too

    def _mark(self, key: str) -> None:
        os.makedirs(self._files, exist_ok=True)
        os.makedirs(self._gone, exist_ok=True)
        with open(self._mark_of(key), "w", encoding="utf-8"):
            pass

    def _is_marked(self, key: str) -> bool:
        return os.path.exists(self._mark_of(key))

    def _is_gone(self, key: str) -> bool:
        """Tell whether what is really there, or a directory above it, was removed or moved."""
        if not os.path.exists(self._gone):
            return False
        while not self._is_marked(key):
            if key == os.path.dirname(key):
                return False
            key = os.path.dirname(key)
        return True

    def _mark_of(self, key: str) -> str:
        return os.path.join(self._gone, hashlib.sha256(os.fsencode(key)).hexdigest()[:32])


def _error(number: int, key: str) -> OSError:
    return OSError(number, os.strerror(number), key)
