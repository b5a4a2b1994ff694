"""Settings of the C library's malloc in this process. Imports no torch."""

import ctypes
import sys

# <malloc.h>
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 2**31 - 1
_LARGEST_THRESHOLD_BYTES = 32 << 20  # glibc takes no larger one


def keep_freed_memory() -> bool:
    """Make glibc keep the memory of freed tensors for the next ones, rather than return it.

    By default large blocks go back to the kernel as soon as they are free, so that every step gets
    its activations as new pages, which the kernel clears and maps one by one: up to half of a small
    network's step on a CPU. What is kept is what the step needs anyway. Blocks above 32 MiB still
    come from the kernel.

    Returns:
        Whether the C library is glibc and took it; with others nothing changes.
    """
    if not sys.platform.startswith("linux"):
        return False
    # Only glibc has `mallopt` with these options; musl has neither.
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    set_option = library.mallopt
    trimmed = set_option(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    mapped = set_option(_M_MMAP_THRESHOLD, _LARGEST_THRESHOLD_BYTES)
    return bool(trimmed and mapped)
