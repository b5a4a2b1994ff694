"""Disks and data: room and speed, whether all hosts see the same files, and have the same data."""

import os
import secrets
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from paceline.doctor.facts import DiskFacts
from paceline.options.fields import OptionValue

_WRITTEN_BYTES = 16 << 20
_CHUNK_BYTES = 1 << 20
_ROOM_BYTES = 4 * _WRITTEN_BYTES
"""A fuller disk isn't written to."""
_LOOKING_S, _LOOK_S = 3.0, 0.1
_MARK = ".paceline-doctor-"


def disk_facts(directory: str) -> DiskFacts:
    """Measure the place of a directory: its nearest parent that is there."""
    place = existing(directory)
    try:
        usage = shutil.disk_usage(place)
    except OSError as error:
        return DiskFacts(directory=str(place), problem=_problem_of(error))
    # Measure the speed only where the test file leaves enough room.
    speed, problem = None, ""
    try:
        if usage.free > _ROOM_BYTES:
            speed = _write_speed(place)
    except OSError as error:
        problem = _problem_of(error)
    return DiskFacts(
        directory=str(place),
        free_bytes=usage.free,
        total_bytes=usage.total,
        write_bytes_per_s=speed,
        problem=problem,
    )


def existing(directory: str) -> Path:
    """Give a directory, or the nearest one above it that is there."""
    path = Path(directory).expanduser().absolute()
    return next(place for place in (path, *path.parents) if place.is_dir())


def leave_mark(directory: str) -> tuple[str, str]:
    """Write a small file that the other hosts are to look for.

    Returns:
        Its path and its content.

    Raises:
        OSError: It can't be written.
    """
    text = secrets.token_hex(16)
    path = existing(directory) / f"{_MARK}{text[:8]}"
    with path.open("x") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return str(path), text


def sees_mark(path: str, text: str) -> bool:
    """Look for another host's file; network file systems may need a moment."""
    until_s = time.monotonic() + _LOOKING_S
    while True:
        with suppress(OSError, UnicodeDecodeError):
            if Path(path).read_text() == text:
                return True
        if not Path(path).parent.is_dir() or time.monotonic() > until_s:
            return False
        time.sleep(_LOOK_S)


def remove_mark(path: str) -> None:
    """Remove the file that `leave_mark` has written."""
    if Path(path).name.startswith(_MARK):
        Path(path).unlink(missing_ok=True)


def _write_speed(place: Path) -> float:
    """Write and sync a file, as a snapshot is; in bytes per second."""
    path = place / f"{_MARK}{secrets.token_hex(4)}"
    content = os.urandom(_CHUNK_BYTES)  # nothing that a file system could compress
    try:
        with path.open("xb") as file:
            began_s = time.monotonic()
            for _ in range(_WRITTEN_BYTES // _CHUNK_BYTES):
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
            return _WRITTEN_BYTES / max(time.monotonic() - began_s, 1e-6)
    finally:
        path.unlink(missing_ok=True)


def _problem_of(error: OSError) -> str:
    return error.strerror or str(error)


@dataclass(frozen=True, kw_only=True)
class DataRequest:
    """A recipe whose data is to be looked at."""

    reference: str = ""
    """See `load_recipe`; empty: none."""
    arguments: Mapping[str, OptionValue] = field(default_factory=dict)
    seed: int = 0


def data_facts(request: DataRequest) -> dict[str, str]:
    """Build a recipe's job, and say what its data sets are: by `training`, `validation`, `test`.

    Raises:
        PacelineError: The recipe isn't there, fails, or its data isn't there.
    """
    from paceline.data.fingerprint import data_fingerprint
    from paceline.training.recipe import load_recipe
    from paceline.training.rng import seed_everything

    seed_everything(request.seed)
    job = load_recipe(request.reference)(**request.arguments)
    sets = {"training": job.train, "validation": job.validation, "test": job.test}
    return {name: data_fingerprint(data) for name, data in sets.items() if data is not None}
