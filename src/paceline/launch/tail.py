"""Reads what is appended to a file, as it comes."""

import codecs
from pathlib import Path
from typing import final


@final
class Tail:
    """A file that grows; it may not be there yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._unfinished = ""

    @property
    def seen(self) -> bool:
        """Whether there was anything to read."""
        return self._position > 0

    def read(self, *, whole_lines: bool = True) -> str:
        """Give what has come since the last time.

        Args:
            whole_lines: Keep a line without an end for the next time; else it is ended here.
        """
        text = self._unfinished + self._decoder.decode(self._new_bytes())
        lines, newline, self._unfinished = text.rpartition("\n")
        if self._unfinished and not whole_lines:
            text, self._unfinished = f"{text}\n", ""
            return text
        return lines + newline

    def _new_bytes(self) -> bytes:
        # Opened anew each time: only then do network file systems look how long the file is now.
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                content = file.read()
        except OSError:
            return b""
        self._position += len(content)
        return content
