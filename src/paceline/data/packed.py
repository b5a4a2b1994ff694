"""Image folders packed into raw uint8 images, which are mapped into memory, and an index.

`index.json` holds sizes, class names and the SHA-256 of every block; each split has `SPLIT.images`
(N x 3 x size x size bytes), `SPLIT.labels` (N little-endian int64) and `SPLIT.files.json` (the N
files they are of). An interrupted packing continues after the last block in its journal.
"""

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from paceline.data.decode import BrokenImageError, decoded_to
from paceline.data.imagefolder import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    ImageTree,
    describe_broken,
    read_file,
    refuse_broken,
    scan_tree,
)
from paceline.data.loading.dataset_worker import run_in_order
from paceline.data.memory import TensorData
from paceline.data.options import PackOptions
from paceline.errors import DataError, UsageError
from paceline.files import fsync_directory, read_json_object, write_atomic, write_json, writing
from paceline.launch.worker_count import usable_cores
from paceline.options.fields import read_dataclass

FORMAT = 1
"""Changes whenever older readers couldn't read what is written."""
_INDEX_MAX_BYTES = 1 << 30
INDEX = "index.json"
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, kw_only=True)
class PackedBlock:
    """A run of images, checked together."""

    num_images: int
    sha256: str
    broken: tuple[tuple[str, str], ...] = ()
    """Images that were left out here: path and reason."""


@dataclass(frozen=True, kw_only=True)
class PackedSplit:
    """One split of a packed folder."""

    num_images: int
    labels_sha256: str
    blocks: tuple[PackedBlock, ...]


@dataclass(frozen=True, kw_only=True)
class PackIndex:
    """What `index.json` holds."""

    size: int
    source: str
    """Fingerprint of the image folder."""
    class_names: tuple[str, ...]
    splits: Mapping[str, PackedSplit]

    @property
    def image_bytes(self) -> int:
        """Size of one image."""
        return 3 * self.size * self.size


def images_file(split: str) -> str:
    """Name the file of a split's images."""
    return f"{split}.images"


def labels_file(split: str) -> str:
    """Name the file of a split's labels."""
    return f"{split}.labels"


def write_index(directory: Path, index: PackIndex) -> None:
    """Write `index.json`, whole or not at all."""
    write_json(directory / INDEX, {"format": FORMAT, **asdict(index)})


def read_index(directory: Path) -> PackIndex:
    """Read `index.json`, and check that the files have the sizes that it states.

    Raises:
        DataError: The directory holds no packed folder, or one that is damaged or too new.
    """
    path = directory / INDEX
    try:
        content = read_json_object(path, _INDEX_MAX_BYTES)
        if content["format"] != FORMAT:
            raise DataError(
                f"{path}: written in the format {content['format']}, but this Paceline reads "
                f"{FORMAT}: pack the folder again"
            )
        index = read_dataclass(PackIndex, content)
    except FileNotFoundError as error:
        raise DataError(
            f"{directory} holds no packed images: there is no {INDEX}. Make it with "
            f"`paceline pack FOLDER {directory}`"
        ) from error
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path} can't be read: {error!r}. {_again(directory)}") from error
    # Sizes alone: hashing would read the whole data set, which `verify_packed` does.
    for split, packed in index.splits.items():
        _check_size(directory / images_file(split), packed.num_images * index.image_bytes)
        _check_size(directory / labels_file(split), packed.num_images * 8)
    return index


def load_packed(directory: Path, verify: bool = False) -> Mapping[str, TensorData]:
    """Open a packed image folder; its images stay on disk and are mapped into memory.

    The same images as `load_image_folder` with the same size gives, in the same order. Workers of a
    node share the memory.

    Args:
        directory: What `paceline pack` wrote.
        verify: Read everything once and compare its checksums.

    Returns:
        The splits that are there, by name; their images are kept on the host.

    Raises:
        DataError: There is no packed folder, or it is damaged.
    """
    index = read_index(directory)
    if verify:
        verify_packed(directory)
    return {split: _open_split(directory, index, split) for split in index.splits}


def verify_packed(directory: Path) -> None:
    """Read a packed folder whole and compare its checksums.

    Raises:
        DataError: Something differs; names the file and the images.
    """
    index = read_index(directory)
    for split, packed in index.splits.items():
        labels = directory / labels_file(split)
        if hashlib.sha256(labels.read_bytes()).hexdigest() != packed.labels_sha256:
            raise DataError(f"{labels} is damaged (its SHA-256 differs). {_again(directory)}")
        _verify_images(directory / images_file(split), index, packed)


def _verify_images(path: Path, index: PackIndex, packed: PackedSplit) -> None:
    first = 0
    with path.open("rb") as file:
        for block in packed.blocks:
            digest = hashlib.sha256()
            left = block.num_images * index.image_bytes
            # Blocks may be larger than memory should hold: read them a chunk at a time.
            while left:
                chunk = file.read(min(left, _CHUNK_BYTES))
                digest.update(chunk)
                # An empty read is the file's end: the hash then differs.
                left -= len(chunk) or left
            if digest.hexdigest() != block.sha256:
                raise DataError(
                    f"{path} is damaged: the SHA-256 of the images {first} to "
                    f"{first + block.num_images - 1} differs. {_again(path.parent)}"
                )
            first += block.num_images


def _open_split(directory: Path, index: PackIndex, split: str) -> TensorData:
    count = index.splits[split].num_images
    shape = (count, 3, index.size, index.size)
    # Private: nothing that is done to the tensor reaches the file.
    flat = torch.from_file(
        str(directory / images_file(split)),
        shared=False,
        size=count * index.image_bytes,
        dtype=torch.uint8,
    )
    labels = np.fromfile(directory / labels_file(split), dtype="<i8")
    return TensorData(
        name=f"{directory.name}/{split}",
        images=flat.view(shape),
        labels=torch.from_numpy(labels.astype(np.int64)),
        class_names=index.class_names,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        keep_on_host=True,
    )


def _check_size(path: Path, expected: int) -> None:
    size = path.stat().st_size if path.is_file() else None
    if size != expected:
        what = "is missing" if size is None else f"has {size} bytes instead of {expected}"
        raise DataError(f"{path} {what}. {_again(path.parent)}")


def _again(directory: Path) -> str:
    return f"Remove {directory} and pack it again"


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
        block_bytes: About how much is decoded, written and checked together.

    Returns:
        The index of what is there now.

    Raises:
        DataError: The folder isn't as expected, or has broken images and `on_broken` is `error`.
        UsageError: `out` holds something else or can't be written, or another process is packing
            there.
        StorageError: The disk is full.
    """
    tree = scan_tree(source)
    partial = out.with_name(f".{out.name}.partial")
    with writing(out, hint="Run the command again to resume"):
        if out.exists():
            return _already_there(tree, out, options)
        # One process at a time; the journal says which blocks an earlier call has completed.
        with _owned(partial):
            journal = _resume(partial, tree, options, report)
            _write_blocks(partial, tree, options, journal, progress, block_bytes)
            _refuse_or_skip_broken(tree, options, journal, report)
            index = _finish(partial, tree, options, journal)
            if options.verify:
                verify_packed(partial)
            # Durable before it is renamed: the final name stands for a complete directory.
            (partial / _JOURNAL).unlink()
            fsync_directory(partial)
            partial.rename(out)
            fsync_directory(out.parent)
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
    # Other data or another size: nothing of it can be used.
    if not lines or lines[0] != head:
        for path in partial.iterdir():
            path.unlink()
        write_atomic(partial / _JOURNAL, _line(head))
        lines = [head]
    for entry in lines[1:]:
        journal[str(entry["split"])].append(read_dataclass(PackedBlock, entry))
    write_atomic(partial / _JOURNAL, b"".join(map(_line, lines)))
    # Blocks that were under way, and images beyond the last block in the journal, are written
    # again.
    for left_behind in partial.glob("*.block"):
        left_behind.unlink()
    for split, blocks in journal.items():
        with (partial / images_file(split)).open("ab") as file:
            file.truncate(sum(b.num_images for b in blocks) * 3 * options.size**2)
    done = sum(b.num_images for blocks in journal.values() for b in blocks)
    if done:
        report(f"resuming after {done:,} images")
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
    # Blocks are decoded by several processes, and appended by this one in the order of the images.
    tasks = list(_tasks(partial, tree, options, journal, block_bytes))
    jobs = max(1, min(options.jobs or usable_cores(), len(tasks)))
    blocks = run_in_order(_decode_block, (task for _, task in tasks), jobs)
    with (partial / _JOURNAL).open("ab") as noted:
        for (split, task), block in zip(tasks, blocks, strict=True):
            # Images first, then the line of the journal: `_resume` cuts off images that have no
            # line.
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


def _refuse_or_skip_broken(
    tree: ImageTree, options: PackOptions, journal: Journal, report: Report
) -> None:
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
        # Labels in the order of the images, without the broken ones that were skipped.
        left_out = {path for block in blocks for path, _ in block.broken}
        good = [entry for entry in tree.splits[split] if entry.path not in left_out]
        content = np.array([entry.label for entry in good], dtype="<i8").tobytes()
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
