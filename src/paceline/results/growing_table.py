"""Reads new rows of a CSV table while a training appends to it."""

import os
from pathlib import Path
from typing import final

from paceline.files import open_plain


@final
class GrowingTable:
    """A table to which rows are appended; a resumed training replaces it by a shorter one."""

    def __init__(self, path: Path, most_bytes: int) -> None:
        """Create the growing table.

        Args:
            path: Of the table; it is only read.
            most_bytes: Read at once; the rest comes the next time.
        """
        self._path = path
        self._most_bytes = most_bytes
        self._inode = 0
        self._header = b""
        self._position = 0

    def read(self) -> tuple[str, bool]:
        """Read the complete rows that are new; all of them where the file has been replaced.

        Returns:
            The header and the rows, empty where there is no new row; and whether the table has been
            begun anew since the last call.

        Raises:
            OSError, ValueError: There is no such table, or it isn't a plain file.
        """
        with open_plain(self._path) as file:
            status = os.fstat(file.fileno())
            is_anew = status.st_ino != self._inode or status.st_size < self._position
            if is_anew:
                self._inode, self._header = status.st_ino, file.readline(self._most_bytes)
                self._position = len(self._header)
            if not self._header.endswith(b"\n"):  # it is being written
                self._inode = self._position = 0
                return "", is_anew
            file.seek(self._position)
            content = file.read(self._most_bytes)
        whole = content[: content.rfind(b"\n") + 1]
        self._position += len(whole)
        return (self._header + whole).decode(errors="replace") if whole else "", is_anew
