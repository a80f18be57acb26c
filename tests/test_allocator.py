"""Client processes reuse freed memory unless the user configures malloc."""

import os
import platform
import subprocess
import sys

import pytest

from posy.allocator import USER_VARIABLES

PROGRAM = """
import resource, sys
import torch
from posy.allocator import keep_freed_memory
from posy.client_app.workspace import Workspace
from posy.strategies.registry import read_settings

if sys.argv[1] == "keep":
    Workspace(read_settings({"device": "cpu"}))

def faults(steps):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(steps):
        torch.ones(16 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults(5)
count = faults(20)
print(keep_freed_memory(), count)
"""
"""Each step allocates and frees 64 MiB, more than the largest block that glibc keeps by default."""


def faults(choice: str, **environment: str) -> tuple[str, int]:
    """Return whether a new process keeps freed memory, and the number of page faults in 20 steps.

    With ``keep``, the process creates a client's workspace.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in USER_VARIABLES}
    command = [sys.executable, "-c", PROGRAM, choice]
    keeps_memory, count = subprocess.run(
        command, env=inherited | environment, capture_output=True, text=True, check=True
    ).stdout.split()
    return keeps_memory, int(count)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="requires glibc")
def test_freed_memory_is_reused_by_the_next_step():
    keeps_memory, count = faults("keep")
    assert keeps_memory == "True"
    assert 10 * count < faults("leave")[1]


@pytest.mark.slow
def test_user_malloc_variables_take_precedence():
    assert faults("keep", MALLOC_TRIM_THRESHOLD_="131072")[0] == "False"
