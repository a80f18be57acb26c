"""Peak memory of a run."""

import math
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import active_children

import torch

from posy.forked import private_memory


@dataclass
class Memory:
    """Peak memory of a run on a device. It is not measured in every round, because Linux counts all pages each time."""

    device: torch.device
    _peaks: dict[str, int] = field(default_factory=dict)
    _measured: float = -math.inf

    def peak(self, at_most_old: float) -> dict[str, int]:
        """Return the result of :func:`peak_memory`, or a cached result less than ``at_most_old`` seconds old."""
        if (now := time.monotonic()) - self._measured >= at_most_old:
            self._peaks, self._measured = peak_memory(self.device), now
        return self._peaks


def peak_memory(device: torch.device) -> dict[str, int]:
    """Return the peak memory of this run's processes and of its tensors on a GPU, in bytes.

    For forked processes, the function counts the current private memory instead of the peak.
    """
    peaks = {}
    with suppress(ImportError):
        import resource  # noqa: PLC0415 - not available on Windows

        unit = 1 if sys.platform == "darwin" else 1024
        forked = sum(private_memory(process.pid or 0) for process in active_children())
        peaks["peak-memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit + forked
    if device.type == "cuda":
        peaks["peak-gpu-memory"] = torch.cuda.max_memory_allocated(device)
    return peaks
