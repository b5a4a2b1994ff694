import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.distributed.allocator import TUNABLES, with_huge_pages

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


_IN_HUGE_PAGES = """
import ctypes
from pathlib import Path

library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
library.mallopt(-3, 32 << 20)
size = 16 << 20
ctypes.memset(library.malloc(ctypes.c_size_t(size)), 1, size)
parts = Path("/proc/self/smaps").read_text().split("[heap]")[1:]
print(any(" hg" in part.split("VmFlags:")[1].splitlines()[0] for part in parts))
"""
_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    not _THP.exists() or "[madvise]" not in _THP.read_text(), reason="huge pages for who asks"
)
@pytest.mark.skipif(platform.libc_ver() < ("glibc", "2.35"), reason="glibc 2.35")
@pytest.mark.parametrize(("tunables", "has"), [("", True), ("glibc.malloc.hugetlb=0", False)])
def test_memory_is_to_come_in_huge_pages_unless_somebody_says_no(tunables: str, has: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _IN_HUGE_PAGES],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {TUNABLES: with_huge_pages(tunables)},
    )
    assert done.stdout.split() == [str(has)]


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
