"""Configure the C library's memory allocator so that a training step reuses the memory of the previous step."""

import ctypes
import os
from functools import cache

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Options of glibc's ``mallopt`` (malloc.h): number of freed bytes to keep, and minimum size of a mapped block."""
THRESHOLD_BYTES = 1 << 30
"""Value of both options in bytes. This process keeps freed memory up to this size."""
USER_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Environment variables that set these glibc options."""


@cache
def keep_freed_memory() -> bool:
    """Make this process and its forks keep freed memory, and return whether the C library accepts the options.

    By default, glibc returns large blocks to the system, which must then clear every page again in the next step.
    The function has no effect with another C library, or if the user has set one of the environment variables
    :data:`USER_VARIABLES`.
    """
    if any(name in os.environ for name in USER_VARIABLES):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library
        return False
    return all(mallopt(option, THRESHOLD_BYTES) for option in (MMAP_THRESHOLD, TRIM_THRESHOLD))
