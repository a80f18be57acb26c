"""Repeated compression of images by `benchmarks.jpeg`."""

import numpy as np

from benchmarks.jpeg import BORDERS, compressed


def photographs() -> np.ndarray:
    """Return images with smooth shades and edges, before any compression."""
    rng = np.random.default_rng(0)
    shades = np.repeat(np.repeat(rng.integers(0, 256, (8, 8, 8, 3)), 4, axis=1), 4, axis=2)
    return np.clip(shades + rng.normal(0, 10, shades.shape), 0, 255).astype(np.uint8)


def error(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.sqrt(np.mean((a.astype(float) - b) ** 2)))


def test_uniform_image_is_unchanged() -> None:
    grey = np.full((2, 32, 32, 3), 128, np.uint8)
    assert np.array_equal(compressed(grey, 5), grey)


def test_shifted_blocks_lose_more_than_aligned_blocks() -> None:
    first = compressed(photographs(), 8)
    assert first.shape == (8, 32, 32, 3) and first.dtype == np.uint8
    aligned, shifted = error(compressed(first, 8), first), error(compressed(first, BORDERS[0]), first)
    assert shifted > 1.3 * aligned
    assert 0.5 * error(first, photographs()) < shifted < error(first, photographs())
