"""A child process whose output is read without blocking, such as `kubectl logs --follow`."""

import codecs
import os
import subprocess
from collections.abc import Sequence
from typing import final

_PIECE_BYTES = 65536
_ENDING_S = 5.0


@final
class ChildCommand:
    """A running command, in a session of its own: the terminal's Ctrl-C doesn't reach it."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        is_read: bool = False,
    ) -> None:
        """Start it.

        Args:
            is_read: Whether `read` gives its output; else it goes where ours goes.
        """
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if is_read else None,
            start_new_session=True,
        )
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        if self._process.stdout is not None:
            os.set_blocking(self._process.stdout.fileno(), False)

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.poll()

    def read(self) -> str | None:
        """Give what it has printed since the last call; None at the end of its output."""
        assert self._process.stdout is not None
        descriptor, text = self._process.stdout.fileno(), ""
        while True:
            try:
                piece = os.read(descriptor, _PIECE_BYTES)
            except BlockingIOError:
                return text
            # End of file: reported once the rest has been given.
            if not piece:
                return text or None
            text += self._decoder.decode(piece)

    def end(self) -> None:
        """End it, if it still runs; waits some seconds at most."""
        self._process.terminate()
        try:
            self._process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
