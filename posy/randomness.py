"""Random streams that depend on nothing but (seed, purpose, round, client)."""

import zlib

import numpy as np
import torch


def seed_of(seed: int, purpose: str, *key: int) -> int:
    """Return a 63-bit seed for one purpose, for example ``("batches", round, client)``."""
    words = [seed, zlib.crc32(purpose.encode()), *key]
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> 1)


def model_seed(seed: int, number: int) -> int:
    """Return the seed of the initial weights of one of several models; the first has the seed of a single model."""
    return seed_of(seed, "model", number) if number else seed


def numpy_generator(seed: int, purpose: str, *key: int) -> np.random.Generator:
    """Return a NumPy generator for one purpose."""
    return np.random.default_rng(seed_of(seed, purpose, *key))


def torch_generator(seed: int, purpose: str, *key: int) -> torch.Generator:
    """Return a PyTorch generator (on the CPU, so that every device draws the same numbers)."""
    return torch.Generator().manual_seed(seed_of(seed, purpose, *key))
