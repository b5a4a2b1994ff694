"""Run directories to copy, and stores that do as a test wants."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import torch

from paceline.checkpoint.format import Snapshot
from paceline.checkpoint.manifest import FileEntry
from paceline.checkpoint.remote.copier import RunCopier
from paceline.checkpoint.remote.record import CopyRecord
from paceline.checkpoint.remote.store import DirectoryStore, RemoteStore
from paceline.checkpoint.store import SnapshotStore
from paceline.results.run_directory import RunDirectory
from tests.support import snapshots

RUN_JSON = '{"format": 1, "kind": "recipe", "recipe": "digits"}\n'


class StoreUnderTest(RemoteStore):
    """A directory that notes what happens, and fails on demand."""

    def __init__(self, root: Path) -> None:
        super().__init__(lambda: None)
        self.inner = DirectoryStore(f"file://{root}", lambda: None)
        self.done: list[str] = []
        self.before: Callable[[str, str], None] = lambda what, name: None

    def write(self, name: str, source: BinaryIO, entry: FileEntry) -> None:
        self._note("write", name)
        self.inner.write(name, source, entry)

    def create(self, name: str, content: bytes) -> bool:
        self._note("create", name)
        return self.inner.create(name, content)

    def read(self, name: str) -> Iterator[bytes]:
        self.before("read", name)
        return self.inner.read(name)

    def names(self) -> list[str]:
        return self.inner.names()

    def delete(self, name: str) -> None:
        self._note("delete", name)
        self.inner.delete(name)

    def _note(self, what: str, name: str) -> None:
        self.before(what, name)
        self.done.append(f"{what} {name}")

    def whole(self) -> list[int]:
        names = [name.split("/") for name in self.names()]
        return sorted(int(n[1][5:]) for n in names if n[-1] == "manifest.json")


def a_run(path: Path) -> RunDirectory:
    run = RunDirectory.named(path)
    run.make()
    run.run_json.write_text(RUN_JSON)
    run.metrics_csv.write_text("epoch,step\n")
    run.rank_log(0).write_text("a line\n")
    return run


def a_snapshot(step: int) -> Snapshot:
    tensors = {"model": {"a": torch.full((100,), float(step))}}
    return Snapshot(step=step, tensors=tensors, state={})


def publish(run: RunDirectory, snapshot: Snapshot, *, best: bool = False, keep: int = 3) -> None:
    snapshots.publish(SnapshotStore(run.snapshots, keep), snapshot, best=best)


def copier_of(run: RunDirectory, store: RemoteStore, keep: int = 3) -> RunCopier:
    record = CopyRecord.read(run) or CopyRecord(url="file:///away/run")
    record.write(run)
    copier = RunCopier(run, store, record, keep)
    copier.claim()
    return copier
