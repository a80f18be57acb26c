"""Checks on user files: Posy opens only regular files, and reads only data that fits into memory."""

import contextlib
import json
import os
import stat
from pathlib import Path
from typing import Any

from posy.data.errors import DataError

_MEMORY_SHARE = 0.8  # fraction of the free memory that data may occupy
_JSON_GROWTH = 4  # minimum factor by which JSON grows when it is loaded as Python objects


def check_regular(path: Path) -> int:
    """Return the size in bytes of a regular file, following links.

    Raise :class:`DataError` for any other file, such as a pipe, which may never end.
    """
    try:
        status = os.stat(path)  # noqa: PTH116 - pathlib handles errors differently
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be opened ({_reason(error)})") from error
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path}: not a regular file; Posy does not read directories, pipes or devices")
    return status.st_size


def check_fits(size: float, where: str) -> None:
    """Raise :class:`DataError` if data of ``size`` bytes would fill too much of the free memory."""
    free = free_memory()
    if size > _MEMORY_SHARE * free:
        raise DataError(f"{where}: does not fit into memory ({size / 1e9:.3g} GB; {free / 1e9:.3g} GB are free)")


def read_json(path: Path) -> Any:
    """Return the content of a JSON file, or raise :class:`DataError` if it is invalid or too large for memory."""
    check_fits(_JSON_GROWTH * check_regular(path), str(path))
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: not readable JSON ({_reason(error)})") from error


def free_memory() -> float:
    """Return the bytes of memory still available to this process, or infinity if the system does not report them."""
    limits = [float("inf")]
    with contextlib.suppress(OSError, ValueError):  # not Linux, or no cgroup limit
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        limits += [1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        if limit != "max":
            lines = (group / "memory.stat").read_text(encoding="ascii").splitlines()
            cache = sum(int(line.split()[1]) for line in lines if line.startswith(("inactive_file ", "active_file ")))
            limits.append(float(limit) - float((group / "memory.current").read_text(encoding="ascii")) + cache)
    return min(limits)


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)


def is_pfllib(path: Path) -> bool:
    """Return whether a directory has PFLlib's layout: train/0.npz and a folder test."""
    # Unlike pathlib, os.path returns False if a path is invalid or cannot be read.
    return os.path.isfile(path / "train" / "0.npz") and os.path.isdir(path / "test")  # noqa: PTH112, PTH113
