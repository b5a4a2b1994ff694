"""Mirrors a run directory to remote storage: what is copied, in which order, what is deleted.

The place mirrors the run directory. A snapshot's files come first, then the run's small files, its
manifest last: whoever finds a manifest finds a snapshot that is whole, and tables at least as new.
"""

import fcntl
import json
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import final

from paceline._version import __version__
from paceline.checkpoint.manifest import STATE, TENSORS, Manifest, read_manifest
from paceline.checkpoint.remote.record import CopyRecord
from paceline.checkpoint.remote.store import RemoteStore, entry_of
from paceline.errors import SnapshotError, UsageError
from paceline.files import parse_json, read_plain
from paceline.options.shell import command_line
from paceline.results.run_directory import RunDirectory

OWNER = "paceline-owner.json"
"""Says whose copies these are."""
BEST = "snapshots/best.json"
SUMMARY = "summary.json"
RUN = "run.json"
MANIFEST_MAX_BYTES = 1 << 20
SMALL_MAX_BYTES = 64 << 20
SMALL_NAMES = (RUN, "metrics.csv", "steps.csv", "profile.json", "report.html")
_OTHER = re.compile(
    r"tracker-[\w.-]+\.json|logs/(rank-\d+\.log|(.+-)?failure-rank-\d+\.json|hang-\d+\.txt)"
)
_LOG_MAX_BYTES = 8 << 20
_LARGE_BYTES, _GROWN_BY = 64 << 10, 1.25
"""Between snapshots a file beyond this is sent again once it has grown so much: a table that gets a
few rows each time would otherwise be sent whole each time. A resume drops these rows anyway."""
_SNAPSHOT = re.compile(r"snapshots/step-([0-9]{12})/(.+)")
_NAME = re.compile(r"step-([0-9]{12})")


class TakenError(UsageError):
    """Another run directory's copies are there."""


@final
class RunCopier:
    """Brings one run directory's state to a store, as often as it is called. One at a time."""

    def __init__(
        self, run: RunDirectory, store: RemoteStore, record: CopyRecord, keep_last: int
    ) -> None:
        """Only store; nothing is read yet.

        Args:
            keep_last: How many of the newest snapshots are kept there, besides the best.
        """
        self.record = record
        self._run = run
        self._store = store
        self._keep_last = keep_last
        self._there: dict[int, bytes] | None = None
        """Manifests of the snapshots that are whole there; None: not known yet."""
        self._best_there = -1
        self._has_summary = False
        """Whether the end of a training is there."""
        self._sent: dict[str, str] = {}
        """SHA-256 of the files that were sent and verified."""
        self._sent_bytes: dict[str, int] = {}
        """Sizes of the small files among them."""
        self._seen: set[int] = set()
        self._copied_to = -1
        self._unfit: set[bytes] = set()
        """Manifests of snapshots whose files are damaged here."""
        self._may_remove = False
        self._at_start: frozenset[int] = frozenset()
        """The steps of what was here at the first look."""

    def claim(self) -> None:
        """Make the place this run's, or see that it is.

        Raises:
            TakenError: It is another training's, or another machine has gone on with this one.
        """
        # 1. The first to create the owner's file has the place, also where two try at once.
        own = {"format": 1, "token": self.record.token, "host": socket.gethostname()}
        own |= {"run": self._run.path.name, "paceline": __version__}
        content = (json.dumps(own, indent=2) + "\n").encode()
        if self._store.create(OWNER, content):
            return
        # 2. It is this run's already, or its former owner's whose training is resumed here.
        owner = self._owner()
        token = owner.get("token")
        if token == self.record.token:
            return
        if token is not None and token == self.record.takes_over:
            self._store.write_bytes(OWNER, content)
            return
        # 3. It is somebody else's.
        url = self.record.url
        raise TakenError(
            f"{url} holds the copies of another training, or another machine has gone on with "
            f"this one (its owner: {owner.get('run')!r} on {owner.get('host')!r}). Go on with "
            f"what is there, in a new --run-dir: {command_line('resume', url)}; or copy to another "
            "place: --copy-to"
        )

    def release(self) -> None:
        """Give the place up again where nothing was copied: the training hasn't begun."""
        if self._owner().get("token") == self.record.token and RUN not in self._store.names():
            self._store.delete(OWNER)

    def copy(self, *, files: bool = True, is_last: bool = True) -> None:
        """Copy what isn't there yet: the newest snapshot, the best one and the small files.

        Args:
            files: Whether the small files are due, besides those that come with a snapshot.
            is_last: Whether also what has grown by little since is due.

        Raises:
            TakenError: The place has become another's; nothing more is to be copied.
            Exception: The store failed. Another call goes on where this one failed.
        """
        there = self._list_remote()
        if self._has_summary and not self._run.summary_json.exists():
            self._check_owner()
            self._store.delete(SUMMARY)  # a training that goes on hasn't ended
            self._has_summary = False
        # The newest first: that is what a machine that is lost would lose.
        local = self._local()
        self._seen |= {step for step in local.keys() - there.keys() if step > self._copied_to}
        newest = max(local, default=-1)
        for step in dict.fromkeys((newest, self._best_here())):
            if step in local and there.get(step) != local[step] and local[step] not in self._unfit:
                self._check_owner()
                self._copy_snapshot(step, local[step], there)
        if files:
            self._check_owner()
            self._copy_files(is_last=is_last)
        self._copy_best(there)
        # Only when a new one is whole there do old ones go.
        if self._may_remove and newest in there:
            self._remove_old(newest, there)
            self._may_remove = False
        self.record = replace(self.record, newest_step=max(there, default=-1))

    def copy_summary(self) -> None:
        """Copy `summary.json`, after everything else."""
        self._copy_small(SUMMARY)
        self._has_summary = True

    def _list_remote(self) -> dict[int, bytes]:
        """Find out, once, what is there; remove the parts of snapshots that never became whole."""
        if self._there is not None:
            return self._there
        # A snapshot is whole once its manifest, which is copied last, is there.
        there, parts = {}, []
        names = self._store.names()
        self._has_summary = SUMMARY in names
        for name in names:
            match = _SNAPSHOT.fullmatch(name)
            if match is None:
                continue
            if match[2] == "manifest.json":
                there[int(match[1])] = self._store.read_small(name, MANIFEST_MAX_BYTES) or b""
            else:
                parts.append((int(match[1]), name))
        best = self._store.read_small(BEST, MANIFEST_MAX_BYTES)
        self._best_there = step_of_best(best)
        # What never became whole goes, but for parts of what is still here and copied further.
        local = self._local()
        self._at_start = frozenset(local)
        for step, name in parts:
            if step not in there and step not in local:
                self._store.delete(name)
        self._there, self._copied_to = there, max(there, default=-1)
        self.record = replace(self.record, newest_step=self._copied_to)
        return there

    def _local(self) -> dict[int, bytes]:
        """Give the manifests of the snapshots that are whole here."""
        copied = {}
        with suppress(FileNotFoundError):
            for path in self._run.snapshots.iterdir():
                named = _NAME.fullmatch(path.name)
                if named is None:
                    continue
                with suppress(OSError, ValueError, SnapshotError):
                    content = read_plain(path / "manifest.json", MANIFEST_MAX_BYTES)
                    if read_manifest(content, path.name).step == int(named[1]):
                        copied[int(named[1])] = content
        return copied

    def _best_here(self) -> int:
        with suppress(OSError, ValueError):
            return step_of_best(read_plain(self._run.path / BEST, MANIFEST_MAX_BYTES))
        return -1

    def _copy_snapshot(self, step: int, content: bytes, there: dict[int, bytes]) -> None:
        place = f"snapshots/step-{step:012d}"
        manifest = read_manifest(content, place)
        if step in there:
            # Trained again to the same step, with another result: the old one's files are replaced,
            # so that it may not be found meanwhile.
            self._store.delete(f"{place}/manifest.json")
            del there[step]
        try:
            with self._held(place):
                for name in (TENSORS, STATE):
                    self._send(f"{place}/{name}", manifest, name)
        except (FileNotFoundError, SnapshotError):
            self._unfit.add(content)  # it was removed meanwhile, or is damaged
            return
        self._copy_files()
        self._store.write_bytes(f"{place}/manifest.json", content)
        there[step] = content
        self._note_copied(step, there)

    def _send(self, place: str, manifest: Manifest, name: str) -> None:
        entry = manifest.files[name]
        if self._sent.get(place) == entry.sha256:
            return
        with (self._run.path / place).open("rb", buffering=0) as source:
            self._store.write(place, source, entry)
        self._sent[place] = entry.sha256

    def _note_copied(self, step: int, there: Mapping[int, bytes]) -> None:
        left_out = {seen for seen in self._seen if seen < step and seen not in there}
        self._copied_to = max(self._copied_to, step)
        self._seen = {seen for seen in self._seen if seen > self._copied_to}
        self._may_remove, record = True, self.record
        self.record = replace(
            record,
            newest_step=max(there),
            snapshots=record.snapshots + 1,
            skipped=record.skipped + len(left_out),
        )
        self._sent = {n: sha for n, sha in self._sent.items() if not n.startswith("snapshots/")}

    @contextmanager
    def _held(self, place: str) -> Iterator[None]:
        """Keep the training from removing a snapshot in the block: see `SnapshotStore`."""
        descriptor = os.open(self._run.path / place / "manifest.json", os.O_RDONLY | os.O_CLOEXEC)
        try:
            with suppress(OSError):  # a file system without locks: what changes is noticed
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            yield
        finally:
            os.close(descriptor)

    def _copy_files(self, *, is_last: bool = True) -> None:
        for name in SMALL_NAMES:
            if is_last or self._has_grown(name):
                self._copy_small(name)
        with suppress(FileNotFoundError):
            for path in sorted((*self._run.path.iterdir(), *self._run.logs.iterdir())):
                name = path.relative_to(self._run.path).as_posix()
                fits = is_log_or_tracker(name) and path.stat().st_size <= _LOG_MAX_BYTES
                if fits and (is_last or self._has_grown(name)):
                    self._copy_small(name)

    def _has_grown(self, name: str) -> bool:
        """Tell whether a file is small, or differs in size enough to be worth sending again."""
        before = self._sent_bytes.get(name, 0)
        try:
            now = (self._run.path / name).stat().st_size
        except OSError:
            return False
        return before < _LARGE_BYTES or not before <= now < before * _GROWN_BY

    def _copy_small(self, name: str) -> None:
        """Copy a file where it has changed since; one that isn't there, or no plain file, not."""
        try:
            content = read_plain(self._run.path / name, SMALL_MAX_BYTES)
        except (OSError, ValueError):
            return
        entry = entry_of(content)
        if self._sent.get(name) != entry.sha256:
            self._store.write_bytes(name, content)
            self._sent[name] = entry.sha256
            self._sent_bytes[name] = len(content)

    def _copy_best(self, there: Mapping[int, bytes]) -> None:
        """Point to the best snapshot, once it is there."""
        best = self._best_here()
        if best in there and best != self._best_there:
            self._copy_small(BEST)
            self._best_there = best

    def _remove_old(self, newest: int, there: dict[int, bytes]) -> None:
        """Remove what `keep_last` removes here.

        So are later steps, of a branch that was given up, once the training has come to a new
        snapshot: before, they may be all that is left of it.
        """
        kept = set(sorted(step for step in there if step <= newest)[-self._keep_last :])
        if newest in self._at_start:
            kept |= {step for step in there if step > newest}
        for step in sorted(there.keys() - kept - {self._best_there}):
            self._check_owner()
            # The manifest first: what is left is no snapshot.
            for name in ("manifest.json", TENSORS, STATE):
                self._store.delete(f"snapshots/step-{step:012d}/{name}")
            del there[step]

    def _check_owner(self) -> None:
        owner = self._owner()
        if owner and owner.get("token") != self.record.token:
            raise TakenError(
                f"{owner.get('host')!r} has gone on with this training from its copies: nothing "
                "more is copied from here"
            )
        if not owner:
            self.claim()

    def _owner(self) -> Mapping[str, object]:
        return read_owner(self._store)


def is_log_or_tracker(name: str) -> bool:
    """Tell whether a file is one of the logs, or says which of a tracker's runs this is."""
    return _OTHER.fullmatch(name) is not None


def read_owner(store: RemoteStore) -> Mapping[str, object]:
    """Read whose copies are there; empty where there is no such mark."""
    content = store.read_small(OWNER, MANIFEST_MAX_BYTES)
    if content is None:
        return {}
    try:
        owner = parse_json(content)
    except ValueError:
        owner = None
    return owner if isinstance(owner, dict) else {"host": "unknown", "run": "unknown"}


def step_of_best(content: bytes | None) -> int:
    """Read `best.json`: the step of the snapshot that it names; -1 where it names none."""
    try:
        record = parse_json(content or b"")
    except ValueError:
        return -1
    name = record.get("snapshot") if isinstance(record, dict) else None
    named = _NAME.fullmatch(name) if isinstance(name, str) else None
    return int(named[1]) if named else -1
