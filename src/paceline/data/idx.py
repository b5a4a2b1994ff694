"""The IDX format of MNIST and its relatives: a few header bytes, then numbers; gzipped or not.

The format is described at the end of https://yann.lecun.com/exdb/mnist/.
"""

import gzip
import io
import math
import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.errors import DataError

_GZIP_MAGIC = b"\x1f\x8b"
_UNSIGNED_BYTE = 0x08
_MOST_BYTES = 1 << 34
"""No header may ask for more memory than this (16 GiB)."""


def read_idx(path: Path, advice: str = "") -> NDArray[np.uint8]:
    """Read an IDX file of unsigned bytes whole, and check it whole.

    Args:
        path: The file; whether it is gzipped is seen from its content, not from its name.
        advice: Where to get a good copy; added to every error message.

    Returns:
        uint8 array of the shape that the file states.

    Raises:
        DataError: The file is missing, unreadable, truncated, too long or no IDX file of bytes.
    """
    try:
        with path.open("rb") as file:
            zipped = file.read(2) == _GZIP_MAGIC
            file.seek(0)
            if not zipped:
                return _read_stream(file)
            with gzip.GzipFile(fileobj=file) as unzipped:
                return _read_stream(unzipped)
    except FileNotFoundError:
        reason = "the file is missing"
    except EOFError:
        reason = "the file is truncated: its gzip data ends too early"
    except (gzip.BadGzipFile, zlib.error) as error:
        reason = f"the file is corrupt: {error}"
    except OSError as error:
        reason = f"the file can't be read: {error.strerror}"
    except ValueError as error:
        reason = str(error)
    raise DataError(" ".join(f"{path}: {reason}. {advice}".split()))


def _read_stream(stream: io.BufferedIOBase) -> NDArray[np.uint8]:
    shape = _read_shape(stream)
    content = np.empty(math.prod(shape), dtype=np.uint8)
    found = _fill(stream, content)
    if found < len(content):
        raise ValueError(
            f"the file is truncated: {found} of {len(content)} bytes after the header, "
            f"which states the shape {shape}"
        )
    if stream.read(1):  # reading to the end also makes gzip compare its checksum
        raise ValueError(
            f"the file is corrupt: it goes on after the {len(content)} bytes it states"
        )
    return content.reshape(shape)


def _read_shape(stream: io.BufferedIOBase) -> tuple[int, ...]:
    magic = stream.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[3] == 0:
        raise ValueError(f"this is no IDX file: it begins with {magic.hex(' ') or 'nothing'}")
    if magic[2] != _UNSIGNED_BYTE:
        raise ValueError(
            f"the file holds numbers of type 0x{magic[2]:02x}, not unsigned bytes (0x08)"
        )
    sizes = stream.read(4 * magic[3])
    if len(sizes) < 4 * magic[3]:
        raise ValueError("the file is truncated: it ends within the header")
    shape = struct.unpack(f">{magic[3]}I", sizes)
    if math.prod(shape) > _MOST_BYTES:
        raise ValueError(f"the file is corrupt: its header states the shape {shape}")
    return shape


def _fill(stream: io.BufferedIOBase, content: NDArray[np.uint8]) -> int:
    """Read until the array is full or the stream ends; gives the number of bytes read."""
    view = content.data
    filled = 0
    while filled < len(view):
        count = stream.readinto(view[filled:])
        if not count:
            break
        filled += count
    return filled
