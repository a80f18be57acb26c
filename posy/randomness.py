"""Create random streams that depend only on (seed, purpose, round, client)."""

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

_LOCK = RLock()  # all threads share PyTorch's default generator


def seed_of(seed: int, purpose: str, *key: int) -> int:
    """Return a 63-bit seed for one purpose, for example ``("batches", round, client)``."""
    words = [seed, zlib.crc32(purpose.encode()), *key]
    # A list gives the same result, but NumPy reads an array faster.
    entropy = np.array(words, np.uint32) if min(words) >= 0 and max(words) < 1 << 32 else words
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]) >> 1


def model_seed(seed: int, number: int) -> int:
    """Return the seed of the initial weights of model ``number``; model 0 uses the run's own seed."""
    return seed_of(seed, "model", number) if number else seed


def numpy_generator(seed: int, purpose: str, *key: int) -> np.random.Generator:
    """Return a NumPy generator for one purpose."""
    return np.random.default_rng(seed_of(seed, purpose, *key))


def torch_generator(seed: int, purpose: str, *key: int) -> "torch.Generator":
    """Return a PyTorch generator on the CPU, so that runs draw the same numbers on every device."""
    import torch  # noqa: PLC0415 - slow to import, and not needed for settings

    return torch.Generator().manual_seed(seed_of(seed, purpose, *key))


@contextmanager
def own_generator(device: "torch.device | None" = None) -> Iterator[Callable[[int], None]]:
    """Yield a function that seeds PyTorch's default generators, and restore their state afterwards."""
    import torch  # noqa: PLC0415 - slow to import, and not needed for settings

    gpus = [device] if device is not None and device.type == "cuda" else []

    def seed(number: int) -> None:
        # torch.manual_seed would also seed the generators of all accelerators.
        torch.default_generator.manual_seed(number)
        for gpu in gpus:
            with torch.cuda.device(gpu):
                torch.cuda.manual_seed(number)

    with _LOCK, torch.random.fork_rng(devices=gpus):
        yield seed


@contextmanager
def seeded(number: int) -> Iterator[None]:
    """Seed PyTorch's default generator, and restore its state afterwards."""
    with own_generator() as seed:
        seed(number)
        yield
