import gzip
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from paceline.data.idx import read_idx
from paceline.errors import DataError
from tests.support.idx_files import idx_bytes, write_idx

VALUES = np.arange(60, dtype=np.uint8).reshape(3, 4, 5)
CONTENT = idx_bytes(VALUES)
ZIPPED = gzip.compress(CONTENT, mtime=0)


@pytest.mark.parametrize("gz", [False, True])
@pytest.mark.parametrize("values", [VALUES, VALUES[0, 0], VALUES[:0]])
def test_reads_what_was_written(tmp_path: Path, gz: bool, values: np.ndarray) -> None:
    found = read_idx(write_idx(tmp_path / "file", values, gz=gz))
    assert found.dtype == np.uint8
    assert found.shape == values.shape
    assert np.array_equal(found, values)


def test_gzip_is_seen_from_the_content(tmp_path: Path) -> None:
    path = tmp_path / "named-otherwise"
    path.write_bytes(ZIPPED)
    assert np.array_equal(read_idx(path), VALUES)


def with_flipped_crc(content: bytes) -> bytes:
    zipped = bytearray(gzip.compress(content, mtime=0))
    zipped[-8] ^= 1
    return bytes(zipped)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (b"", "no IDX file: it begins with nothing"),
        (b"<html>not found</html>", "no IDX file: it begins with 3c 68 74 6d"),
        (CONTENT[:3], "no IDX file"),
        (b"\0\0\x0d" + CONTENT[3:], "numbers of type 0x0d, not unsigned bytes"),
        (b"\0\0\x08\0", "no IDX file"),
        (CONTENT[:9], "truncated: it ends within the header"),
        (CONTENT[:-1], "truncated: 59 of 60 bytes"),
        (CONTENT + b"\0", "corrupt: it goes on after the 60 bytes"),
        (b"\0\0\x08\x03" + b"\xff" * 12, "corrupt: its header states the shape"),
        (ZIPPED[:-12], "truncated: its gzip data ends too early"),
        (ZIPPED[:20], "truncated"),
        (with_flipped_crc(CONTENT), "corrupt: CRC check failed"),
        (ZIPPED[:10] + b"\xff" * 30, "corrupt: Error -3"),
        (ZIPPED + b"rest", "corrupt: Not a gzipped file"),
        (gzip.compress(CONTENT[:-1], mtime=0), "truncated: 59 of 60 bytes"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_a_broken_file_is_named(tmp_path: Path, broken: bytes, message: str) -> None:
    path = tmp_path / "train-images"
    path.write_bytes(broken)
    with pytest.raises(DataError, match=f"{re.escape(str(path))}: .*{message}.* Get it there"):
        read_idx(path, "Get it there")


@pytest.mark.parametrize(
    ("make", "message"),
    [(lambda path: None, "the file is missing"), (Path.mkdir, "can't be read: Is a directory")],
)
def test_no_file(tmp_path: Path, make: Callable[[Path], None], message: str) -> None:
    path = tmp_path / "train-images"
    make(path)
    with pytest.raises(DataError, match=f"train-images: .*{message}"):
        read_idx(path)
