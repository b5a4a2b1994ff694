"""A file system on which no file may grow beyond some bytes, for the time of a test."""

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def small_files(limit: int) -> Iterator[None]:
    """Let this process write no file beyond `limit` bytes: more is an error, EFBIG.

    Python's compiled modules are files too. One that is cut off would stay in `__pycache__` and
    fail in every later import, so that none is written meanwhile.
    """
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    compiles = sys.dont_write_bytecode
    try:
        sys.dont_write_bytecode = True
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        sys.dont_write_bytecode = compiles
