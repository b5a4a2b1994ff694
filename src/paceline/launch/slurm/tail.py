"""Shows what is appended to a file, line by line, as it comes."""

import codecs
from pathlib import Path
from typing import TextIO, final


@final
class Tail:
    """A file that grows; it may not be there yet."""

    def __init__(self, path: Path, out: TextIO) -> None:
        self._path = path
        self._out = out
        self._position = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._unfinished = ""

    @property
    def seen(self) -> bool:
        """Whether there was anything to show."""
        return self._position > 0

    def pump(self) -> None:
        """Show the lines that have come since the last time."""
        text = self._unfinished + self._decoder.decode(self._read())
        *lines, self._unfinished = text.split("\n")
        if lines:
            self._out.write("".join(f"{line}\n" for line in lines))
            self._out.flush()

    def finish(self) -> None:
        """Show the rest, a last line without an end too."""
        self.pump()
        if self._unfinished:
            self._out.write(f"{self._unfinished}\n")
            self._out.flush()
            self._unfinished = ""

    def _read(self) -> bytes:
        # Opened anew each time: only then do network file systems look how long the file is now.
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                content = file.read()
        except OSError:
            return b""
        self._position += len(content)
        return content
