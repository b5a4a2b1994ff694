"""Snapshot directory of a training: atomic publishing, damaged ones set aside, old ones deleted.

Written by one process at a time (the owner of the run directory's lock); read by any.
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import final

from paceline.checkpoint.format import (
    MANIFEST,
    HostSnapshot,
    Snapshot,
    holds_nothing_else,
    manifest_text,
    no_phase,
    of_unknown_format,
    read_snapshot,
    write_host_snapshot,
)
from paceline.checkpoint.streaming import Piece, parse_sent, write_received
from paceline.errors import SnapshotError, UsageError
from paceline.files import fsync_directory, read_json_object, write_json

_NAME = re.compile(r"step-([0-9]{12})")
_BEST = "best.json"
_GENERATION = "generation.json"
_WRITING = ".tmp-"
_REPLACED = ".replaced-"
_TRASH = ".trash-"
_LEFT = (_WRITING, _TRASH, _REPLACED, f".{_BEST}.", f".{_GENERATION}.")
_NONE_LEFT = "and there is none before it"
_BEGINNING = ": the training starts from the beginning"
# A file system that is about to be full fails in more places than the files themselves.
_SLACK_BYTES = 64 << 10
_SPARES = 2
# Hashing takes so much longer above that making and removing files doesn't count.
_SPARE_MAX_BYTES = 64 << 20


@final
class SnapshotStore:
    """A directory of snapshots, each named `step-` and twelve digits."""

    def __init__(self, directory: Path, keep_last: int) -> None:
        """Name the directory; it is made by the first `publish`.

        Args:
            keep_last: How many of the newest are kept, besides the best.

        Raises:
            UsageError: `keep_last` is below 2.
        """
        if keep_last < 2:
            raise UsageError(f"--keep-last is {keep_last}; it must be at least 2")
        self.directory = directory
        self.keep_last = keep_last
        self._spares: list[Path] = []

    def publish(
        self, host: HostSnapshot, *, best: bool, phase: Callable[[str], None] = no_phase
    ) -> Path:
        """Write a snapshot so that readers, crashes and power cuts see it whole or not at all.

        Written aside in the same file system, synced, renamed, directory synced; only then the
        pointer to the best one is changed and old ones are removed. One of the same step is
        replaced.

        Old ones that are removed for it may stay as spare directories, under temporary names: later
        ones are written over them, which spares the processor most of making and removing files.
        `drop_spares` removes them.

        Args:
            best: Point `best.json` to it.
            phase: Called after each phase with its name (tests put faults here).

        Returns:
            The snapshot's directory.

        Raises:
            OSError: The disk is full or can't be written; earlier snapshots stay and no leftovers
                do.
        """
        self._make_directory()
        final_path = self.path_of(host.step)
        # Phases: write under a temporary name; rename; sync the directory; only then remove old
        # ones.
        spare = self._take_spare(host.num_bytes)
        writing = spare or self._temporary(_WRITING, final_path)
        try:
            write_host_snapshot(writing, host, phase, over=spare is not None)
            self._rename_into_place(writing, final_path, phase)
        except BaseException:
            shutil.rmtree(writing, ignore_errors=True)
            raise
        fsync_directory(self.directory)
        phase("durable")
        if best:
            self.mark_best(host.step)
            phase("best")
        self._remove_old(host.step, keep_spare=host.num_bytes <= _SPARE_MAX_BYTES)
        phase("removed old")
        return final_path

    def receive(
        self, manifest: str, pieces: Iterable[Piece], *, phase: Callable[[str], None] = no_phase
    ) -> Path:
        """Publish a snapshot that another host sends, as `publish` does one of this host.

        One of the same step is replaced. Old ones stay: the next `publish` removes them.

        Args:
            manifest: Of the snapshot, as its host has it.
            pieces: Its files; see `write_received`.

        Returns:
            The snapshot's directory. It is to be verified when it is read, as any other.

        Raises:
            OSError: The disk is full or can't be written; no leftovers stay.
            SnapshotError: What arrives isn't what the manifest says; no leftovers stay.
        """
        content = manifest.encode()
        sent = parse_sent(content)
        final_path = self.path_of(sent.step)
        self.check_room(len(content) + sum(entry.bytes for entry in sent.files.values()))
        writing = self._temporary(_WRITING, final_path)
        try:
            write_received(writing, content, pieces)
            self._rename_into_place(writing, final_path, phase)
        except BaseException:
            shutil.rmtree(writing, ignore_errors=True)
            raise
        fsync_directory(self.directory)
        return final_path

    def check_room(self, num_bytes: int) -> None:
        """Check that a snapshot of this size would fit.

        Raises:
            OSError: It wouldn't, or the directory can't be made.
        """
        self._make_directory()
        self._check_space(num_bytes)

    def manifest(self, step: int) -> str:
        """Give the manifest of a step's snapshot; see `manifest_text`."""
        return manifest_text(self.path_of(step))

    def mark_best(self, step: int) -> None:
        """Point `best.json` to the snapshot of a step, which must be in place."""
        write_json(self.directory / _BEST, {"snapshot": self.path_of(step).name})

    def generation(self) -> int:
        """Give the number noted by `note_generation`; 0 where there is none."""
        try:
            number = read_json_object(self.directory / _GENERATION).get("generation")
        except (OSError, ValueError):
            return 0
        return number if type(number) is int and number > 0 else 0

    def note_generation(self, number: int) -> None:
        """Note how often the training has been started, for later starts on this host to see."""
        self._make_directory()
        write_json(self.directory / _GENERATION, {"generation": number})

    def set_aside_above(self, step: int, report: Callable[[str], None]) -> None:
        """Rename snapshots of later steps: the training goes on from an earlier one of its own.

        Left in place they would count as the newest, and those to come as old ones.
        """
        for later in self.steps():
            if later > step:
                path = self.path_of(later)
                moved = _set_aside(path, "superseded")
                report(f"the training goes on from step {step}, not from {path}: {moved}")

    def drop_spares(self) -> None:
        """Remove what `publish` has kept to write later ones over."""
        while self._spares:
            shutil.rmtree(self._spares.pop(), ignore_errors=True)

    def steps(self) -> list[int]:
        """List the steps of all snapshots in place, ascending; none is verified here."""
        try:
            names = os.listdir(self.directory)  # noqa: PTH208  # a third of the time of `iterdir`
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(int(match[1]) for match in map(_NAME.fullmatch, names) if match)

    def path_of(self, step: int) -> Path:
        """Name the directory of a step's snapshot, whether it exists or not."""
        return self.directory / f"step-{step:012d}"

    def newest_good(
        self,
        report: Callable[[str], None],
        at_most: int | None = None,
        *,
        alone: bool = True,
    ) -> Snapshot | None:
        """Read the newest snapshot that verifies; damaged newer ones become `<name>.damaged`.

        Called by one process; the others then read the step that it found with `read_snapshot`.

        Args:
            report: Called with one line for each damaged snapshot.
            at_most: Leave out snapshots of later steps.
            alone: Whether no other host may have one.

        Returns:
            The snapshot, or None where there is no good one.

        Raises:
            SnapshotError: The newest is of an unknown format version: it is not damaged, and going
                on from an older one would lose what a newer Paceline did.
            InfrastructureError: The host refuses to read it.
        """
        steps = [step for step in self.steps() if at_most is None or step <= at_most]
        # From the newest down: the first that verifies.
        for step in reversed(steps):
            path = self.path_of(step)
            try:
                return read_snapshot(path)
            except SnapshotError as error:
                # Written by a newer version: not damaged, so it is not set aside.
                if of_unknown_format(path):
                    raise
                moved = _set_aside(path, "damaged")
                none_left = _NONE_LEFT + _BEGINNING if alone else f"{_NONE_LEFT} on this host"
                then = "the snapshot before it is tried" if step != steps[0] else none_left
                report(f"{error}; {moved}, {then}")
        return None

    def best(self) -> Path | None:
        """Give the directory of the best snapshot, or None where none is marked or it is gone."""
        try:
            name = read_json_object(self.directory / _BEST).get("snapshot")
        except (OSError, ValueError):
            return None
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            return None
        path = self.directory / name
        return path if path.is_dir() else None

    def resolve(self, which: str) -> Path:
        """Find the snapshot that a user asks for; it isn't verified here.

        Args:
            which: "best", "last", or a snapshot's directory: a path, or a name in this store.

        Raises:
            UsageError: There is none; the message lists what there is.
        """
        steps = self.steps()
        known = ", ".join(self.path_of(step).name for step in steps[-5:])
        snapshot: Path | None
        if which == "best":
            snapshot = self.best()
        elif which == "last":
            # A directory without a manifest merely has a snapshot's name.
            places = map(self.path_of, reversed(steps))
            snapshot = next((path for path in places if (path / MANIFEST).is_file()), None)
        else:
            # A path as given, or a name within the directory.
            candidates = (Path(which), self.directory / which)
            snapshot = next((path for path in candidates if (path / MANIFEST).is_file()), None)
        if snapshot is None:
            those = f"Give best, last or a snapshot's directory; the newest there: {known}"
            raise UsageError(
                f"no snapshot {which!r} for {self.directory}. "
                f"{those if known else 'It holds none: none has been written there yet'}"
            )
        return snapshot

    def sweep(self) -> None:
        """Remove what interrupted writes left.

        Only for the owner of the run directory, and before its first `publish`.
        """
        if not self.directory.is_dir():
            return
        for path in sorted(self.directory.iterdir()):
            # A crash between the two renames of `_rename_into_place`: the old snapshot gets its
            # name back.
            original = self.directory / path.name.removeprefix(_REPLACED)
            if path.name.startswith(_REPLACED) and not os.path.lexists(original):
                path.rename(original)
                fsync_directory(self.directory)
            elif path.name.startswith(_LEFT):
                _remove(path)

    def _take_spare(self, needed_bytes: int) -> Path | None:
        """Give a spare directory where there is one to write over, and check that there is room."""
        try:
            self._check_space(needed_bytes)
        except OSError:
            if not self._spares:
                raise
            # Spares are kept only to be written over: they go first where space runs out.
            self.drop_spares()
            self._check_space(needed_bytes)
        # The directory was synced after the first of two was renamed, when the last snapshot was
        # published: no power cut brings back its old name, so that its files may change.
        if len(self._spares) < _SPARES:
            return None
        spare = self._spares.pop(0)
        if holds_nothing_else(spare):
            return spare
        shutil.rmtree(spare, ignore_errors=True)
        return None

    def _make_directory(self) -> None:
        if not self.directory.is_dir():
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _temporary(self, kind: str, path: Path) -> Path:
        return self.directory / f"{kind}{path.name}-{secrets.token_hex(4)}"

    def _check_space(self, needed_bytes: int) -> None:
        room = os.statvfs(self.directory)
        if room.f_bavail * room.f_frsize < needed_bytes + _SLACK_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.directory))

    def _rename_into_place(
        self, writing: Path, final_path: Path, phase: Callable[[str], None]
    ) -> None:
        if not os.path.lexists(final_path):
            writing.rename(final_path)
            phase("renamed")
            return
        replaced = self.directory / f"{_REPLACED}{final_path.name}"
        _remove(replaced)
        # A directory can't be renamed over another; `sweep` puts it back if we die between the two
        # renames.
        final_path.rename(replaced)
        try:
            phase("replaced")
            writing.rename(final_path)
        except BaseException:
            replaced.rename(final_path)
            raise
        phase("renamed")
        fsync_directory(self.directory)
        _remove(replaced)

    def _remove_old(self, just_published: int, *, keep_spare: bool) -> None:
        old = [step for step in self.steps()[: -self.keep_last] if step != just_published]
        best = self.best() if old else None
        for path in map(self.path_of, old):
            if path == best or _is_being_copied(path):
                continue
            trash = self._temporary(_TRASH, path)
            # The new snapshot is in place: one that stays too long is no failure, the next time
            # tries again.
            with contextlib.suppress(OSError):
                path.rename(trash)
                if keep_spare and len(self._spares) < _SPARES:
                    self._spares.append(trash)
                    continue
            shutil.rmtree(trash, ignore_errors=True)


def _remove(path: Path) -> None:
    """Remove a directory with all that is in it, or whatever else has its name; a link alone."""
    if path.is_symlink() or not path.is_dir():
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def _is_being_copied(path: Path) -> bool:
    """Tell whether another process holds a snapshot while it copies it (by `--copy-to`)."""
    try:
        descriptor = os.open(path / MANIFEST, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks: the copier notices what changes
        return False
    finally:
        os.close(descriptor)
    return False


def _set_aside(path: Path, why: str) -> str:
    number = 0
    aside = path.with_name(f"{path.name}.{why}")
    while os.path.lexists(aside):
        number += 1
        aside = path.with_name(f"{path.name}.{why}-{number}")
    try:
        path.rename(aside)
    except OSError as error:
        return f"it can't be set aside ({error.strerror})"
    return f"set aside as {aside.name}"
