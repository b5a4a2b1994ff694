"""Streams a snapshot to another host: read there and written here in pieces.

What arrives is held against its manifest before anything of it gets the name of a snapshot.
"""

import hashlib
import os
from collections.abc import Generator, Iterable, Iterator
from io import FileIO
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from paceline.checkpoint.file_writer import write_file
from paceline.checkpoint.format import MANIFEST
from paceline.checkpoint.manifest import FileEntry, Manifest, read_manifest
from paceline.errors import SnapshotError
from paceline.files import fsync_directory, mode_within

PIECE_BYTES = 8 << 20

Piece = tuple[str, memoryview]
"""A file's name and the next bytes of it."""


def parse_sent(content: bytes) -> Manifest:
    """Read a manifest that another host sends.

    Raises:
        SnapshotError: It isn't one, or not as it was written.
    """
    return read_manifest(content, "the manifest that another host sent")


def pieces_of(manifest: Manifest) -> Iterator[tuple[str, int]]:
    """List the pieces that a snapshot travels in, as (file, bytes). Pure."""
    for name, entry in sorted(manifest.files.items()):
        for start in range(0, entry.bytes, PIECE_BYTES):
            yield name, min(PIECE_BYTES, entry.bytes - start)


def read_pieces(
    directory: Path, manifest: Manifest, into: memoryview
) -> Generator[int, None, None]:
    """Read a snapshot's files in the order of `pieces_of`, and check them once more.

    Args:
        into: Where each piece is put; at least `PIECE_BYTES`.

    Returns:
        The bytes of each piece, once it is there.

    Raises:
        SnapshotError: A file isn't what the manifest says.
        OSError: It can't be read.
    """
    for name, pieces in groupby(pieces_of(manifest), key=itemgetter(0)):
        digest, entry = hashlib.sha256(), manifest.files[name]
        # O_NONBLOCK: a pipe in place of the file must not hang the reader.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with FileIO(os.open(directory / name, flags)) as file:
            for _, size in pieces:
                if _read_whole(file, into[:size]) < size:
                    raise SnapshotError(f"{directory / name} has become shorter")
                digest.update(into[:size])
                is_last = file.tell() == entry.bytes
                if is_last and digest.hexdigest() != entry.sha256:
                    raise SnapshotError(f"{directory / name} is damaged: its SHA-256 has changed")
                yield size


def write_received(directory: Path, content: bytes, pieces: Iterable[Piece]) -> None:
    """Write a snapshot that another host sends into a new directory, and wait until it is durable.

    Not atomic by itself: `SnapshotStore.receive` is. Files stay within what the manifest says of
    their names and sizes; the manifest is written last.

    Args:
        directory: Made here, with its parent's permissions; that must exist.
        pieces: Its files, each whole before the next begins; in no more memory than a piece.

    Raises:
        OSError: The disk is full, or it can't be written; leftovers remain.
        SnapshotError: What arrives isn't what the manifest says.
    """
    # Every file that the manifest names must come exactly once, with its size and hash.
    awaited = dict(parse_sent(content).files)
    directory.mkdir(mode=mode_within(directory.parent))
    for name, parts in groupby(pieces, key=itemgetter(0)):
        entry = awaited.pop(name, None)
        if entry is None:
            known = ", ".join(awaited) or "nothing more"
            raise SnapshotError(f"{name!r} arrived, but {known} was awaited")
        chunks = (chunk for _, chunk in parts)
        if write_file(directory / name, _within(entry, name, chunks)) != entry:
            raise SnapshotError(f"{name} arrived damaged: it isn't what its manifest says")
    if awaited:
        raise SnapshotError(f"{', '.join(awaited)} didn't arrive")
    # The manifest comes last: a directory without one is no snapshot.
    write_file(directory / MANIFEST, [memoryview(content)])
    fsync_directory(directory)


def _read_whole(file: FileIO, into: memoryview) -> int:
    """Read until a buffer is full or the file is over. Returns the bytes read."""
    done = 0
    while done < len(into) and (count := file.readinto(into[done:])):
        done += count
    return done


def _within(entry: FileEntry, name: str, chunks: Iterable[memoryview]) -> Iterator[memoryview]:
    """Pass a file's bytes on, but no more than its manifest allows."""
    left = entry.bytes
    for chunk in chunks:
        left -= len(chunk)
        if left < 0:
            raise SnapshotError(f"more of {name} arrived than the {entry.bytes} bytes it has")
        yield chunk
