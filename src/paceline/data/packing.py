"""Packs image folders: decodes every image once, into files that training reads at memory speed.

Processes decode blocks of images; this one appends each block to the split's file in its turn,
syncs it and notes it in a journal. An interrupted packing goes on after the last noted block. The
directory gets its name when everything in it is complete.
"""

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from paceline.data.blocks import count_cores, run_in_order
from paceline.data.decode import BrokenImageError, decoded_to
from paceline.data.imagecheck import describe_broken, read_file, refuse_broken
from paceline.data.imagetree import ImageEntry, ImageTree, scan_tree
from paceline.data.pack_options import PackOptions
from paceline.data.packed import (
    FORMAT,
    INDEX,
    PackedBlock,
    PackedSplit,
    PackIndex,
    block_of,
    images_file,
    labels_file,
    read_index,
    verify_packed,
    write_index,
)
from paceline.errors import DataError, InfrastructureError, UsageError
from paceline.files import fsync_directory, write_atomic

BLOCK_BYTES = 1 << 26
"""Images of a block: what an interruption can cost, per process."""
_JOURNAL = "journal.jsonl"
_OWNER_S = 5.0

Report = Callable[[str], None]
Progress = Callable[[int, int], None]
"""Told how many images of how many are done."""
Journal = dict[str, list[PackedBlock]]


@dataclass(frozen=True, slots=True)
class _Task:
    root: Path
    paths: tuple[str, ...]
    size: int
    target: Path


def pack_images(
    source: Path,
    out: Path,
    options: PackOptions,
    *,
    report: Report = lambda text: None,
    progress: Progress = lambda done, total: None,
    block_bytes: int = BLOCK_BYTES,
) -> PackIndex:
    """Pack an image folder; goes on where an earlier call was interrupted.

    Args:
        source: Holds `train`, and usually `val` and `test`; each holds one folder a class.
        out: The directory to make; nothing else than this packed folder may be there.
        options: Size, processes, what becomes of broken images.
        report: Told in words what happens.
        progress: Told after each block.
        block_bytes: About how much is decoded, written and checked together.

    Returns:
        The index of what is there now.

    Raises:
        DataError: The folder isn't as expected, or has broken images and `on_broken` is `error`.
        UsageError: `out` holds something else, or another process is packing there.
        InfrastructureError: The disk is full or can't be written.
    """
    tree = scan_tree(source)
    if out.exists():
        return _already_there(tree, out, options)
    partial = out.with_name(f".{out.name}.partial")
    try:
        with _owned(partial):
            journal = _resume(partial, tree, options, report)
            _write_blocks(partial, tree, options, journal, progress, block_bytes)
            _judge_broken(tree, options, journal, report)
            index = _finish(partial, tree, options, journal)
            if options.verify:
                verify_packed(partial)
            (partial / _JOURNAL).unlink()
            fsync_directory(partial)
            partial.rename(out)
            fsync_directory(out.parent)
    except OSError as error:
        raise InfrastructureError(
            f"{partial} can't be written: {error.strerror}. Run the command again to go on"
        ) from error
    return index


def list_broken(index: PackIndex) -> list[tuple[str, str]]:
    """List what was left out: path and reason."""
    blocks = [block for split in index.splits.values() for block in split.blocks]
    return [entry for block in blocks for entry in block.broken]


def _already_there(tree: ImageTree, out: Path, options: PackOptions) -> PackIndex:
    if not (out / INDEX).is_file():
        raise UsageError(f"{out} exists and holds no packed images: name another directory")
    index = read_index(out)
    if (index.source, index.size) != (tree.fingerprint(), options.size):
        raise UsageError(
            f"{out} already holds packed images, of size {index.size} and of another folder or of "
            f"{tree.root} before it was changed: remove it, or name another directory"
        )
    if options.verify:
        verify_packed(out)
    return index


@contextmanager
def _owned(partial: Path) -> Iterator[None]:
    """Hold the directory for this process; the kernel lets go of it when the process dies."""
    partial.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _wait_for_lock(descriptor, partial)
        yield
    finally:
        os.close(descriptor)


def _wait_for_lock(descriptor: int, partial: Path) -> None:
    """Take the lock; the processes of a packing that was killed hold it for a moment longer."""
    give_up_at = time.monotonic() + _OWNER_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() >= give_up_at:
                raise UsageError(f"another process is packing into {partial}") from error
        time.sleep(0.05)


def _resume(partial: Path, tree: ImageTree, options: PackOptions, report: Report) -> Journal:
    """Read the journal, and bring the files to where it ends; begin anew if it is of other data."""
    head = {"format": FORMAT, "source": tree.fingerprint(), "size": options.size}
    lines = _complete_lines(partial / _JOURNAL)
    journal: Journal = {split: [] for split in tree.splits}
    if not lines or lines[0] != head:
        for path in partial.iterdir():
            path.unlink()
        write_atomic(partial / _JOURNAL, _line(head))
        lines = [head]
    for entry in lines[1:]:
        journal[str(entry["split"])].append(block_of(entry))
    write_atomic(partial / _JOURNAL, b"".join(map(_line, lines)))
    for left_behind in partial.glob("*.block"):
        left_behind.unlink()
    for split, blocks in journal.items():
        with (partial / images_file(split)).open("ab") as file:
            file.truncate(sum(b.num_images for b in blocks) * 3 * options.size**2)
    done = sum(b.num_images for blocks in journal.values() for b in blocks)
    if done:
        report(f"going on after {done:,} images")
    return journal


def _complete_lines(path: Path) -> list[Mapping[str, object]]:
    """Read the journal up to its last whole line."""
    if not path.exists():
        return []
    *whole, _ = path.read_bytes().split(b"\n")
    return [json.loads(line) for line in whole]


def _line(entry: Mapping[str, object]) -> bytes:
    return json.dumps(entry).encode() + b"\n"


def _write_blocks(
    partial: Path,
    tree: ImageTree,
    options: PackOptions,
    journal: Journal,
    progress: Progress,
    block_bytes: int,
) -> None:
    total = sum(map(len, tree.splits.values()))
    done = sum(_num_files(block) for blocks in journal.values() for block in blocks)
    progress(done, total)
    tasks = list(_tasks(partial, tree, options, journal, block_bytes))
    jobs = max(1, min(options.jobs or count_cores(), len(tasks)))
    blocks = run_in_order(_decode_block, (task for _, task in tasks), jobs)
    with (partial / _JOURNAL).open("ab") as noted:
        for (split, task), block in zip(tasks, blocks, strict=True):
            _append(partial / images_file(split), task.target)
            noted.write(_line({"split": split, **asdict(block)}))
            _sync(noted.fileno(), noted.flush)
            journal[split].append(block)
            done += len(task.paths)
            progress(done, total)


def _tasks(
    partial: Path, tree: ImageTree, options: PackOptions, journal: Journal, block_bytes: int
) -> Iterator[tuple[str, _Task]]:
    """Cut what is left of each split into blocks."""
    images = max(1, block_bytes // (3 * options.size**2))
    for split, entries in tree.splits.items():
        first = sum(map(_num_files, journal[split]))
        for start in range(first, len(entries), images):
            paths = tuple(entry.path for entry in entries[start : start + images])
            target = partial / f"{split}-{start}.block"
            yield split, _Task(tree.root, paths, options.size, target)


def _num_files(block: PackedBlock) -> int:
    return block.num_images + len(block.broken)


def _decode_block(task: _Task) -> PackedBlock:
    """Decode one block into a file of its own; runs in a process of its own."""
    digest = hashlib.sha256()
    broken = []
    with task.target.open("wb") as file:
        for path in task.paths:
            try:
                image = decoded_to(read_file(task.root / path), task.size).numpy().tobytes()
            except BrokenImageError as error:
                broken.append((path, str(error)))
                continue
            digest.update(image)
            file.write(image)
    return PackedBlock(
        num_images=len(task.paths) - len(broken), sha256=digest.hexdigest(), broken=tuple(broken)
    )


def _append(images: Path, block: Path) -> None:
    with images.open("ab") as target:
        with block.open("rb") as source:
            shutil.copyfileobj(source, target, 1 << 24)
        _sync(target.fileno(), target.flush)
    block.unlink()


def _sync(descriptor: int, flush: Callable[[], None]) -> None:
    flush()
    os.fsync(descriptor)


def _judge_broken(tree: ImageTree, options: PackOptions, journal: Journal, report: Report) -> None:
    broken = [e for blocks in journal.values() for block in blocks for e in block.broken]
    if options.on_broken == "error":
        refuse_broken(tree.root, broken, "--on-broken skip (what is decoded already is kept)")
    elif broken:
        report(f"{describe_broken(tree.root, broken)}\nLeft out")
    for split, blocks in journal.items():
        if not sum(block.num_images for block in blocks):
            raise DataError(f"{tree.root / split}: holds no image that could be used")


def _finish(partial: Path, tree: ImageTree, options: PackOptions, journal: Journal) -> PackIndex:
    """Write labels, lists of files and the index."""
    splits = {}
    for split, blocks in journal.items():
        left_out = {path for block in blocks for path, _ in block.broken}
        good = [entry for entry in tree.splits[split] if entry.path not in left_out]
        content = _labels_bytes(good)
        write_atomic(partial / labels_file(split), content)
        files = json.dumps([entry.path for entry in good], indent=0)
        write_atomic(partial / f"{split}.files.json", files.encode())
        splits[split] = PackedSplit(
            num_images=len(good),
            labels_sha256=hashlib.sha256(content).hexdigest(),
            blocks=tuple(blocks),
        )
    index = PackIndex(
        size=options.size,
        source=tree.fingerprint(),
        class_names=tree.class_names,
        splits=splits,
    )
    write_index(partial, index)
    return index


def _labels_bytes(entries: Sequence[ImageEntry]) -> bytes:
    return np.array([entry.label for entry in entries], dtype="<i8").tobytes()
