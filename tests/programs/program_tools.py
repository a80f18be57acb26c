"""Helpers of the program checks: equal clients, constants, and the clients' stored models."""

from pathlib import Path

import numpy as np
import problem
import pytest

from posy.models.parameters import FloatArray
from posy.storage import read_arrays
from posy.strategies.base import PersonalisedStrategy


def equalise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each of the three clients 8 samples, 4 for each of two classes: n_i and n_ij are then uniform weights."""
    monkeypatch.setattr(problem, "SHARES", ((4, 4, 0), (0, 4, 4), (4, 0, 4)))
    monkeypatch.setattr(problem, "SIZES", (8, 8, 8))


def numbers(text: str) -> FloatArray:
    """Return the numbers of a text as float32."""
    return np.array(text.split(), np.float32)


def stored_models(strategy: PersonalisedStrategy, folder: Path) -> list[FloatArray]:
    """Return the local models ``(d,)`` that the clients stored in a folder."""
    files = [folder / f"client-{client}.safetensors" for client in range(strategy.num_clients)]
    return [strategy.architecture.layout.flatten(read_arrays(file)[0]) for file in files]
