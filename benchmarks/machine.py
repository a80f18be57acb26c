"""What a measurement ran on."""

import os
import platform
import time
from typing import Any

import torch

from posy.server_app.results import cpu_model


def machine() -> dict[str, Any]:
    """Return processor, cores, accelerator, versions and date."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d"),
    }
