"""Memory that tensors on a CPU have given back is kept for the next ones, and comes in large pages.

malloc asks the system for each large block and gives it back when it is freed, so each pass gets its tensors as pages
that the system fills with zeros at the first touch: that takes longer than a product of matrices of medium size. With
these settings of glibc freed blocks stay with the process; elsewhere nothing changes.

A processor looks up where a page of 4 KB is in memory, and a model has more of them than it remembers: weights that are
not in its caches are read twice as fast from pages of 2 MB. Linux gives those to whoever asks for them, by default. So
the heap grows at once, before there are tensors, by half of the machine's memory, of which nothing is in use until it
is touched, and asks for large pages there.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
from functools import cache
from pathlib import Path

TRIM_THRESHOLD, TOP_PAD, MMAP_MAX = -1, -2, -4  # parameters of mallopt, from malloc.h
NEVER = -1         # that the heap shrinks
AT_ONCE = 1 << 26  # bytes by which it grows
COMPILED_PRODUCTS = 128  # that oneDNN keeps: more than a pass has, or all decode steps of a call
LARGE_PAGE = 1 << 21
OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", None)  # None: not on Linux


@cache
def keep_freed_memory() -> bool:
    """For the rest of the process. Whether it could be done."""
    system = ctypes.CDLL(None)
    if not hasattr(system, "mallopt"):
        return False
    done = [system.mallopt(name, value) == 1
            for name, value in ((MMAP_MAX, 0), (TRIM_THRESHOLD, NEVER), (TOP_PAD, AT_ONCE))]
    kept = all(done)
    if kept and HUGEPAGE is not None and _may_reserve():
        _ask_for_large_pages(system, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
    return kept


def keep_few_compiled_products() -> None:
    """For the rest of the process, unless its environment has other limits. Before the first product: torch and oneDNN
    read these variables once."""
    for variable in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):  # torch's own cache, and oneDNN's
        os.environ.setdefault(variable, str(COMPILED_PRODUCTS))


def _may_reserve() -> bool:
    """Whether memory that is not touched counts for nothing: not where the system promises no more than it has, nor
    where a limit of the process counts it, which then lacks it for files and threads."""
    limits = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    if any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in limits):
        return False
    try:
        return OVERCOMMIT.read_text().strip() != "2"
    except OSError:
        return False


def _ask_for_large_pages(system: ctypes.CDLL, size: int) -> None:
    """For a block of the heap that nothing uses yet, which the next tensors will be in."""
    system.malloc.restype, system.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    system.free.restype, system.free.argtypes = None, [ctypes.c_void_p]
    system.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    block = system.malloc(size)
    if block:  # else the system has less
        first, last = -(-block // LARGE_PAGE) * LARGE_PAGE, (block + size) // LARGE_PAGE * LARGE_PAGE
        system.madvise(first, last - first, HUGEPAGE)  # fails where the kernel has none: pages stay small
        system.free(block)
