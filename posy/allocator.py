"""The C library's memory: what one training step frees, the next one takes again."""

import ctypes
import os
from functools import cache

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Options of glibc's ``mallopt`` (malloc.h): freed bytes that it keeps, and the size from which a block is mapped."""
KEPT = 1 << 30
"""Bytes below which both leave memory with this process."""
TOLD = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Environment variables by which a person tells glibc the same."""


@cache
def keep_freed_memory() -> bool:
    """Let this process, and those forked from it, keep what they free; return whether the C library does so now.

    By default glibc gives large blocks back to the system, which clears each of their pages when the next step touches
    it. Only glibc can be told, and only where no environment variable tells it already.
    """
    if any(name in os.environ for name in TOLD):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library
        return False
    return all(mallopt(option, KEPT) for option in (MMAP_THRESHOLD, TRIM_THRESHOLD))
