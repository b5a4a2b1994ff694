"""A process with pretend devices, from which programs are forked that have torch imported already.

Run as a module it reads a JSON object a line, `words`, `directory` and `environment`, runs the
program to its end, and writes `returncode`, `stdout` and `stderr`.
"""

import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.pretend_gpu.build import environment

_ANSWER = ("returncode", "stdout", "stderr")


class Host:
    """A machine with pretend devices; a context manager."""

    def __init__(self, built: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            env=environment(built),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def python(
        self, *words: str | Path, directory: Path, devices: int = 1, **settings: str
    ) -> "subprocess.CompletedProcess[str]":
        """Run `python WORDS` to its end, where there are so many devices.

        Args:
            words: `-m MODULE ...` or `SCRIPT ...`.
            directory: Where it runs.
            devices: How many there are.
            settings: Variables: those of device/README.md, and any.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        listed = [str(word) for word in words]
        asked = {
            "words": listed,
            "directory": str(directory),
            "environment": {"PRETEND_GPU_DEVICES": str(devices)} | settings,
        }
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, "the process with the pretend devices has ended"
        return subprocess.CompletedProcess(listed, **json.loads(answer))

    def paceline(
        self, *words: str | Path, directory: Path, devices: int = 1, **settings: str
    ) -> "subprocess.CompletedProcess[str]":
        """Run `paceline WORDS`, as `python`."""
        command = ("-m", "paceline", *words)
        return self.python(*command, directory=directory, devices=devices, **settings)


def _serve() -> None:
    from tests.support.warm import run_warm

    for line in sys.stdin:
        asked = json.loads(line)
        words = [sys.executable, *asked["words"]]
        try:
            done = run_warm(words, Path(asked["directory"]), **asked["environment"])
            answer = (done.returncode, done.stdout, done.stderr)
        except subprocess.TimeoutExpired as error:
            answer = (-1, "", str(error))
        print(json.dumps(dict(zip(_ANSWER, answer, strict=True))), flush=True)


if __name__ == "__main__":
    _serve()
