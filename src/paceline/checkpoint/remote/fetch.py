"""Fetches a run from its copies into a new run directory, to go on with it there.

Only files of names that a run directory has are written, and of snapshots only what their manifests
say. `run.json` comes last: what was cut short before it is no run directory.
"""

import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from mmap import mmap

from paceline.checkpoint.manifest import Manifest, read_manifest
from paceline.checkpoint.remote.copier import (
    BEST,
    MANIFEST_MAX_BYTES,
    RUN,
    SMALL_MAX_BYTES,
    SMALL_NAMES,
    SUMMARY,
    is_log_or_tracker,
    read_owner,
    step_of_best,
)
from paceline.checkpoint.remote.record import CopyRecord
from paceline.checkpoint.remote.store import RemoteStore
from paceline.checkpoint.store import SnapshotStore
from paceline.checkpoint.streaming import PIECE_BYTES, Piece, pieces_of
from paceline.errors import InfrastructureError, SnapshotError, StoreError, UsageError
from paceline.files import write_atomic, writing
from paceline.results.run_directory import RunDirectory

Report = Callable[[str], None]

_MANIFEST = re.compile(r"snapshots/step-([0-9]{12})/manifest\.json")


def fetch_run(url: str, store: RemoteStore, run: RunDirectory, report: Report) -> None:
    """Fetch a run: its small files, the newest snapshot that is whole, and the best one.

    Args:
        run: Where it goes; new or empty.
        report: Told a line about what is fetched, and what is damaged there.

    Raises:
        UsageError: There is no run, or the run directory can't be made.
        StoreError: A small file can't be read.
        StorageError: The disk is full.
    """
    # Look: is there a run, and room for it?
    run.check_new()
    names = store.names()
    if RUN not in names:
        raise UsageError(f"there is no run at {url}{_what_is_there(names)}")
    owner = read_owner(store).get("token")
    run.make()
    try:
        # Snapshots first: what is damaged there is found before anything counts.
        with writing(run.path):
            newest = _fetch_snapshots(store, run, names, report)
            for name in (*SMALL_NAMES, SUMMARY, *filter(is_log_or_tracker, names)):
                if name != RUN:
                    _fetch_small(store, run, name)
            CopyRecord(url=url, takes_over=owner if isinstance(owner, str) else None).write(run)
            _fetch_small(store, run, RUN)
    except BaseException:
        _discard(run)
        raise
    what = f"the snapshot of step {newest}" if newest >= 0 else "no snapshot: there is none yet"
    report(f"Fetched {url} into {run.path}: {what}")


def _discard(run: RunDirectory) -> None:
    """Remove what was fetched of a run that couldn't be fetched whole."""
    for name in (*SMALL_NAMES, SUMMARY, *(path.name for path in run.path.glob("tracker-*.json"))):
        (run.path / name).unlink(missing_ok=True)
    for folder in (run.snapshots, run.logs):
        shutil.rmtree(folder, ignore_errors=True)
    run.discard()


def _fetch_snapshots(
    store: RemoteStore, run: RunDirectory, names: Sequence[str], report: Report
) -> int:
    """Fetch the newest snapshot that is whole, and the best. Returns the newest's step, or -1.

    Raises:
        InfrastructureError: There are snapshots, and none is whole.
    """
    snapshots = SnapshotStore(run.snapshots, keep_last=2)
    steps = sorted((int(n[1]) for n in map(_MANIFEST.fullmatch, names) if n), reverse=True)
    newest = next((step for step in steps if _fetch(store, snapshots, step, report)), -1)
    if steps and newest < 0:
        raise InfrastructureError(f"none of the {len(steps)} snapshots there is whole")
    _fetch_best(store, snapshots, newest, names, report)
    return newest


def _fetch_best(
    store: RemoteStore, snapshots: SnapshotStore, newest: int, names: Sequence[str], report: Report
) -> None:
    """Fetch the best snapshot, and mark it; without one a later result is the best."""
    best = step_of_best(store.read_small(BEST, MANIFEST_MAX_BYTES) if BEST in names else None)
    if not 0 <= best <= newest:
        return
    if best == newest or _fetch(store, snapshots, best, report):
        snapshots.mark_best(best)


def _fetch(store: RemoteStore, snapshots: SnapshotStore, step: int, report: Report) -> bool:
    """Fetch a snapshot; False where it isn't what its manifest says."""
    place = f"snapshots/step-{step:012d}"
    try:
        content = store.read_small(f"{place}/manifest.json", MANIFEST_MAX_BYTES)
        if content is None:
            raise SnapshotError("it has been removed there")
        manifest = read_manifest(content, f"{place}/manifest.json")
        if manifest.step != step:
            raise SnapshotError(f"its manifest is of step {manifest.step}")
        snapshots.receive(content.decode(), _pieces(store, place, manifest))
    except (SnapshotError, FileNotFoundError, StoreError) as error:
        report(f"the copy of the snapshot of step {step} can't be used: {error}")
        return False
    return True


def _pieces(store: RemoteStore, place: str, manifest: Manifest) -> Iterator[Piece]:
    """Read a snapshot's files in the pieces that it is written in, one after the other."""
    # Starts at a page, which writing past the page cache asks for.
    memory = memoryview(mmap(-1, PIECE_BYTES))
    reading: Iterator[bytes] = iter(())
    rest, current = b"", ""
    for name, size in pieces_of(manifest):
        if name != current:
            current, rest, reading = name, b"", store.read(f"{place}/{name}")
        filled = 0
        while filled < size:
            if not rest:
                rest = next(reading, b"")
                if not rest:
                    raise SnapshotError(f"{name} is shorter than its manifest says")
            count = min(size - filled, len(rest))
            memory[filled : filled + count] = rest[:count]
            rest, filled = rest[count:], filled + count
        yield name, memory[:size]


def _fetch_small(store: RemoteStore, run: RunDirectory, name: str) -> None:
    content = store.read_small(name, SMALL_MAX_BYTES)
    if content is not None:
        write_atomic(run.path / name, content)


def _what_is_there(names: Sequence[str]) -> str:
    """Name the runs below, where a user has given the place of all of them."""
    runs = sorted(
        {
            name.partition("/")[0]
            for name in names
            if name.count("/") == 1 and name.endswith(f"/{RUN}")
        }
    )
    if not runs:
        return " (no run.json)"
    listed = ", ".join(runs[-5:])
    return f" itself, but below it. Add a run's name to the URL: {listed}"
