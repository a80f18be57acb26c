"""Files as people have them: only regular files are opened, and only what fits into memory is read."""

import contextlib
import json
import os
import stat
from pathlib import Path
from typing import Any

from posy.data.errors import DataError

_ROOM = 0.8  # fraction of the free memory that data may take
_JSON_GROWTH = 4  # least factor by which JSON grows when its numbers become Python's


def check_regular(path: Path) -> int:
    """Return the size of a regular file in bytes, following links; another, which may never end, is an error."""
    try:
        found = os.stat(path)  # noqa: PTH116 - pathlib's answers differ by error
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be opened ({_reason(error)})") from error
    if not stat.S_ISREG(found.st_mode):
        raise DataError(f"{path}: not a regular file; a directory, a pipe or a device is not read")
    return found.st_size


def check_fits(size: float, where: str) -> None:
    """Raise :class:`DataError` if a number of bytes is more than data may take of the free memory."""
    free = free_memory()
    if size > _ROOM * free:
        raise DataError(f"{where}: more than fits into memory ({size / 1e9:.3g} GB; {free / 1e9:.3g} GB are free)")


def read_json(path: Path) -> Any:
    """Return the content of a JSON file, or raise :class:`DataError` if it is none or more than fits into memory."""
    check_fits(_JSON_GROWTH * check_regular(path), str(path))
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON that can be read ({_reason(error)})") from error


def free_memory() -> float:
    """Return the bytes of memory that this process may still take; infinity where the system does not tell."""
    found = [float("inf")]
    with contextlib.suppress(OSError, ValueError):  # another system, or no group of its own
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found += [1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        if limit != "max":
            told = (group / "memory.stat").read_text(encoding="ascii").splitlines()
            cache = sum(int(line.split()[1]) for line in told if line.startswith(("inactive_file ", "active_file ")))
            found.append(float(limit) - float((group / "memory.current").read_text(encoding="ascii")) + cache)
    return min(found)


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)
