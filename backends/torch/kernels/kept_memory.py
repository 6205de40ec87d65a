"""Memory that tensors on a CPU have given back is kept for the next ones.

malloc asks the system for each large block and gives it back when it is freed, so each pass gets its tensors as pages
that the system fills with zeros at the first touch: that takes longer than a product of matrices of medium size. With
these settings of glibc freed blocks stay with the process; elsewhere nothing changes.
"""

from __future__ import annotations

import ctypes
from functools import cache

TRIM_THRESHOLD, TOP_PAD, MMAP_MAX = -1, -2, -4  # parameters of mallopt, from malloc.h
MOST_FREE = 2**31 - 1  # bytes at the end of the heap from which on it shrinks: the most that mallopt takes
AT_ONCE = 1 << 26      # bytes by which it grows


@cache
def keep_freed_memory() -> bool:
    """For the rest of the process. Whether it could be done."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    done = [mallopt(name, value) == 1
            for name, value in ((MMAP_MAX, 0), (TRIM_THRESHOLD, MOST_FREE), (TOP_PAD, AT_ONCE))]
    return all(done)
