"""Initial weights that depend on a seed alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

import torch

_LOCK = RLock()  # the generator is one for all threads


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from the CPU generator as seeded here, and give it back as it was found."""
    with _LOCK, torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which would seed the accelerators' generators too.
        torch.default_generator.manual_seed(seed)
        yield
