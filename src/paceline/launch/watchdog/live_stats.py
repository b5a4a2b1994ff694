"""The workers' speeds in the run directory, where `paceline workers` finds them."""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from paceline.files import read_json
from paceline.launch.watchdog.stragglers import WorkerSpeed

_PATTERN = "workers*.json"


def live_path(log_dir: Path, node: str = "") -> Path:
    """Name the file of a launch, or of one of its nodes."""
    return log_dir / (f"workers-{node}.json" if node else "workers.json")


def write_live(path: Path, speeds: Sequence[WorkerSpeed]) -> None:
    """Write the speeds: a reader sees all or those before. A full disk is no matter."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with suppress(OSError):  # not synced: after a power cut nobody asks for it
        temporary.write_text(json.dumps([speed.to_json() for speed in speeds]))
        temporary.replace(path)


def remove_live(path: Path) -> None:
    """Remove the file: the training is over."""
    with suppress(OSError):
        path.unlink(missing_ok=True)
        path.with_name(f".{path.name}.{os.getpid()}").unlink(missing_ok=True)


def read_live(log_dir: Path) -> list[WorkerSpeed]:
    """Read the speeds of all workers, the slowest first; none where no training runs."""
    found: dict[int, WorkerSpeed] = {}
    for path in sorted(log_dir.glob(_PATTERN)):
        with suppress(OSError, ValueError):
            speeds = read_json(path)
            for content in speeds if isinstance(speeds, list) else []:
                speed = WorkerSpeed.from_json(content)
                found[speed.rank] = speed
    return sorted(found.values(), key=lambda speed: (-speed.own_s, speed.rank))
