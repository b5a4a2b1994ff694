"""The process boundary around a worker's entry: an exception becomes a record that outlives it."""

import errno
import mmap
import re
import socket
import struct
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import final

from paceline.config.files import write_json
from paceline.errors import ExitCode, PacelineError
from paceline.launch.failures import FailureKind, WorkerFailure, is_lost_peer

_KINDS: dict[int, FailureKind] = {ExitCode.USAGE: "usage", ExitCode.JOB: "job"}
_EXIT_CODES = {
    "usage": ExitCode.USAGE,
    "job": ExitCode.JOB,
    "infrastructure": ExitCode.INFRASTRUCTURE,
}
_WORLD_ERRNOS = {
    errno.EIO,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.ESTALE,
    errno.EROFS,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.EHOSTUNREACH,
    errno.EADDRINUSE,
}
_NOTE = struct.Struct("<q56s")
_NO_STEP = -1
_FROM_LOADER = re.compile(r"Caught (\w+) in \w+ (?:worker )?process \d+\.\nOriginal Traceback")
_HERE = Path(__file__).parent


@final
class StepNote:
    """What this worker is doing right now, for the record of a failure.

    Setting a field writes a few bytes of shared memory, so that the launcher can still read them
    when the worker was killed. Cheap enough for every step (under a microsecond).
    """

    def __init__(self) -> None:
        self._memory: bytearray | mmap.mmap = bytearray(_NOTE.size)
        self._step: int | None = None
        self._operation = ""
        self._write()

    @property
    def step(self) -> int | None:
        """The step that is being computed; None before the first."""
        return self._step

    @step.setter
    def step(self, value: int | None) -> None:
        self._step = value
        self._write()

    @property
    def operation(self) -> str:
        """The operation, such as `backward` or `all-reduce`; at most 56 bytes are kept."""
        return self._operation

    @operation.setter
    def operation(self, value: str) -> None:
        self._operation = value
        self._write()

    def begin(self, step: int, operation: str) -> None:
        """Set both at once."""
        self._step, self._operation = step, operation
        self._write()

    def share(self, path: Path) -> None:
        """Keep the note in a file from now on, where the launcher can read it."""
        with path.open("w+b") as file:
            file.truncate(_NOTE.size)
            self._memory = mmap.mmap(file.fileno(), _NOTE.size)
        self._write()

    def _write(self) -> None:
        step = _NO_STEP if self._step is None else self._step
        _NOTE.pack_into(self._memory, 0, step, self._operation.encode())


note = StepNote()
"""This process's own note; the trainer sets its fields."""


def read_note(path: Path) -> tuple[int | None, str]:
    """Read the note of another process.

    Returns:
        Step and operation; (None, "") where the worker didn't get far enough to write one.
    """
    try:
        step, operation = _NOTE.unpack(path.read_bytes())
    except (OSError, struct.error):
        return None, ""
    text = operation.rstrip(b"\0").decode(errors="replace")
    return (None if step == _NO_STEP else step), text


def failure_path(log_dir: Path, rank: int) -> Path:
    """Name the file that records how a worker failed."""
    return log_dir / f"failure-rank-{rank}.json"


def kind_of(error: BaseException) -> FailureKind:
    """Decide who is at fault for an exception: only an infrastructure failure is worth a retry."""
    if isinstance(error, PacelineError):
        return _KINDS.get(error.exit_code, "infrastructure")
    if isinstance(error, ConnectionError | TimeoutError):
        return "infrastructure"
    if isinstance(error, OSError):
        return "infrastructure" if error.errno in _WORLD_ERRNOS else "job"
    names = {base.__name__ for base in type(error).__mro__}
    text = str(error)
    if isinstance(error, RuntimeError) and (
        any(is_lost_peer(name, text) for name in names) or "is killed by signal" in text
    ):
        return "infrastructure"  # the last is a data loader's worker
    return "job"


def exit_code_of(kind: FailureKind) -> ExitCode:
    """Give the exit code that stands for a kind of failure."""
    return _EXIT_CODES[kind]


def describe(error: BaseException, rank: int) -> WorkerFailure:
    """Make the record of an exception that ended this worker."""
    kind = kind_of(error)
    return WorkerFailure(
        rank=rank,
        host=socket.gethostname(),
        step=note.step,
        exit_code=int(exit_code_of(kind)),
        signal_name=None,
        kind=kind,
        error_type=type(error).__name__,
        message=message_of(error),
        traceback=_traceback(error),
        operation=note.operation,
        time_s=time.time(),
    )


def message_of(error: BaseException) -> str:
    """Give an exception's message, without what a data loader's process wraps around it.

    torch hands such an exception on as one of the same type, with a whole traceback as its message.
    """
    if isinstance(error, SystemExit):
        return f"the job ended its own process by sys.exit({error.code!r})"
    text = str(error)
    if not (found := _FROM_LOADER.match(text)):
        return text
    own = [*re.finditer(rf"^(?:\w+\.)*{found[1]}: ", text, re.MULTILINE)]
    return text[own[-1].end() :].rstrip("\n") if own else text


def _traceback(error: BaseException) -> str:
    """Write the whole traceback, but without the frames at its top that only called the job."""
    frames = error.__traceback__
    while frames and frames.tb_next and _only_calls(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def _only_calls(file: str) -> bool:
    return file.endswith("runpy>") or Path(file).parent in (_HERE, _HERE.parent / "script")


def run_guarded(function: Callable[[str], str], payload: str, log_dir: Path, rank: int) -> str:
    """Run a worker's entry; on an exception, leave a record and raise it on.

    Args:
        function: The entry.
        payload: Its argument.
        log_dir: Where `failure-rank-<n>.json` is written, whole or not at all.
        rank: This worker's rank.

    Returns:
        What the entry returned.
    """
    try:
        return function(payload)
    except KeyboardInterrupt:
        raise  # the user's wish, not a failure
    except BaseException as error:
        record(describe(error, rank), log_dir)
        raise


def record(failure: WorkerFailure, log_dir: Path) -> None:
    """Write a failure's record; without a disk to write to, the log and the exit code must do."""
    try:
        write_json(failure_path(log_dir, failure.rank), failure.to_json())
    except OSError as error:
        print(f"the failure's record could not be written: {error}", flush=True)
