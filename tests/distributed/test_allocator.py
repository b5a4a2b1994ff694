import subprocess
import sys

import pytest

_PROGRAM = """
import ctypes, resource
from paceline.distributed.allocator import keep_freed_memory

kept = keep_freed_memory()
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
library.free.argtypes = [ctypes.c_void_p]
size = 8 << 20

def pages_for_one_block():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    address = library.malloc(ctypes.c_size_t(size))
    ctypes.memset(address, 1, size)
    library.free(address)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

pages_for_one_block()
print(kept, pages_for_one_block())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_a_freed_block_is_used_again_without_new_pages() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], check=True, capture_output=True, text=True
    )
    kept, pages = done.stdout.split()
    if kept == "False":
        pytest.skip("the C library isn't glibc")
    assert int(pages) < 100  # of 2,048


@pytest.mark.skipif(sys.platform.startswith("linux"), reason="other systems")
def test_other_systems_are_left_alone() -> None:
    from paceline.distributed.allocator import keep_freed_memory

    assert not keep_freed_memory()
