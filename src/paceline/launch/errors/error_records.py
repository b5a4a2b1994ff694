"""Writes the exception that ends a worker into a file, which the launcher reads afterwards."""

import errno
import os
import re
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from paceline.errors import DataError, ExitCode, PacelineError, StorageError, UsageError
from paceline.files import read_json, write_json
from paceline.launch.errors.device_errors import DeviceError, device_error
from paceline.launch.errors.failures import FailureKind, WorkerFailure, is_lost_peer
from paceline.launch.heartbeat import note

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
_RECORDS = "failure-rank-*.json"
_FROM_LOADER = re.compile(r"Caught (\w+) in \w+ (?:worker )?process \d+\.\nOriginal Traceback")
_OF_LIBRARY = re.compile(r"(?i)\b(?:CU|MI|ROC|HIP)\w+_STATUS_\w+|\bmiopenStatus\w+")
_PACKAGE = Path(__file__).parents[2]
_CALLERS = (_PACKAGE / "launch" / "errors", _PACKAGE / "launch" / "local", _PACKAGE / "script")


def failure_path(log_dir: Path, rank: int) -> Path:
    """Name the file that records how a worker failed."""
    return log_dir / f"failure-rank-{rank}.json"


def read_failures(log_dir: Path) -> list[WorkerFailure]:
    """Read the records of workers' failures, as far as they are whole."""
    failures = []
    for path in log_dir.glob(_RECORDS):
        with suppress(OSError, ValueError):
            failures.append(WorkerFailure.from_json(read_json(path)))
    return failures


def forget_failures(log_dir: Path) -> None:
    """Remove the records of an earlier launch, which would be taken for this one's failures."""
    for stale in log_dir.glob(f"*{_RECORDS}"):
        stale.unlink(missing_ok=True)


def set_aside(log_dir: Path, prefix: str, ranks: Iterable[int] | None = None) -> None:
    """Rename records, so that they don't speak for what is started next.

    Args:
        prefix: Of their new names, such as `attempt-0`.
        ranks: Whose; all by default.
    """
    every = log_dir.glob(_RECORDS)
    for path in every if ranks is None else [failure_path(log_dir, rank) for rank in ranks]:
        with suppress(FileNotFoundError):  # another node may do the same
            path.rename(path.with_name(f"{prefix}-{path.name}"))


def kind_of(error: BaseException) -> FailureKind:
    """Decide who is at fault for an exception: only an infrastructure failure is worth a retry."""
    return _kind_of(error, _of_device(error, _with_cause(error)))


def _kind_of(error: BaseException, device_error: DeviceError | None) -> FailureKind:
    if isinstance(error, PacelineError):
        has_begun = isinstance(error, UsageError) and note.has_begun
        # "usage" says that nothing was started.
        return "job" if has_begun else _KINDS.get(error.exit_code, "infrastructure")
    if isinstance(error, ConnectionError | TimeoutError):
        return "infrastructure"
    if isinstance(error, OSError):
        return "infrastructure" if error.errno in _WORLD_ERRNOS else "job"
    if device_error is not None:
        return device_error.kind
    # torch raises plain RuntimeErrors for a lost peer: only their text tells.
    names = {base.__name__ for base in type(error).__mro__}
    text = str(error)
    if isinstance(error, RuntimeError) and (
        any(is_lost_peer(name, text) for name in names) or "is killed by signal" in text
    ):
        return "infrastructure"  # the last is a data loader's worker
    return "job"


def _of_device(error: BaseException, text: str) -> DeviceError | None:
    return device_error(text) if isinstance(error, RuntimeError | DataError) else None


def _with_cause(error: BaseException) -> str:
    """Give an exception's message; of a GPU's library also what the GPU says has happened.

    cuDNN and cuBLAS say no more than that they failed, also where an earlier kernel did.
    """
    # These are torch.cuda's alone, ROCm's by the same name; a launcher imports no torch.
    text, torch = message_of(error), sys.modules.get("torch")
    is_vague = isinstance(error, RuntimeError) and _OF_LIBRARY.search(text)
    if not is_vague or device_error(text) or not (torch and torch.cuda.is_initialized()):
        return text
    try:
        torch.cuda.mem_get_info()  # fails as that kernel did, and waits for none
    except RuntimeError as cause:
        first, *others = text.split("\n")
        return "\n".join((f"{first}: {str(cause).partition(chr(10))[0]}", *others))
    return text


def exit_code_of(kind: FailureKind) -> ExitCode:
    """Give the exit code that stands for a kind of failure."""
    return _EXIT_CODES[kind]


def describe(error: BaseException, rank: int) -> WorkerFailure:
    """Make the record of an exception that ended this worker.

    What helps against an error of a GPU is added to the exception, as a note: it then stands under
    every traceback.
    """
    text = _with_cause(error)  # asks the GPU, where that is needed
    device_error = _of_device(error, text)
    kind = _kind_of(error, device_error)
    if device_error is not None and device_error.advice not in getattr(error, "__notes__", ()):
        error.add_note(device_error.advice)
    return WorkerFailure(
        rank=rank,
        host=socket.gethostname(),
        step=note.step,
        exit_code=int(exit_code_of(kind)),
        kind=kind,
        error_type=type(error).__name__,
        message=text,
        traceback=_traceback(error),
        operation=note.operation,
        time_s=time.time(),
        worth_restart=not isinstance(error, StorageError),
    )


def message_of(error: BaseException) -> str:
    """Give an exception's message, without what a data loader's process wraps around it.

    torch hands such an exception on as one of the same type, with a whole traceback as its message.
    """
    if isinstance(error, SystemExit):
        return f"the job ended its own process by sys.exit({error.code!r})"
    text = str(error)
    if not (match := _FROM_LOADER.match(text)):
        return text
    # The last line that begins with the type is where the original message begins.
    own = [*re.finditer(rf"^(?:\w+\.)*{match[1]}: ", text, re.MULTILINE)]
    return text[own[-1].end() :].rstrip("\n") if own else text


def _traceback(error: BaseException) -> str:
    """Write the whole traceback, but without the frames at its top that only called the job."""
    frames = error.__traceback__
    while frames and frames.tb_next and _only_calls(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def _only_calls(file: str) -> bool:
    return file.endswith("runpy>") or Path(file).parent in _CALLERS


def run_guarded(function: Callable[[str], str], payload: str, log_dir: Path, rank: int) -> str:
    """Run a worker's entry; on an exception, leave a record and raise it on.

    Args:
        log_dir: Where `failure-rank-<n>.json` is written, whole or not at all.

    Returns:
        What the entry returned.
    """
    try:
        return function(payload)
    except KeyboardInterrupt:
        raise  # the user's wish, not a failure
    except BaseException as error:
        if not record(describe(error, rank), log_dir):
            print(f"The failure's record could not be written to {log_dir}", flush=True)
        raise


def record(failure: WorkerFailure, log_dir: Path) -> bool:
    """Write a failure's record; False where there is no disk to write it to."""
    try:
        write_json(failure_path(log_dir, failure.rank), failure.to_json())
    except OSError:
        return False
    return True


def end_process(error: PacelineError, rank: int, log_dir: Path) -> NoReturn:
    """End this process for an error that its main thread would never learn of.

    Args:
        error: What is wrong; recorded, and printed below the calling thread's stack.
    """
    record(describe(error, rank), log_dir)
    traceback.print_stack(sys._getframe(1))
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code_of(kind_of(error)))
