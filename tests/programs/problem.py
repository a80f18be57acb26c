"""The problem that published programs and Posy both solve: three clients, two rounds, fixed weights and batches.

Each client's training samples are one batch, so an epoch is one step and their order does not matter. Samples and
weights come from fixed generators. The published programs ran outside this repository on the same arrays. A test stores
their numbers as constants and names the program, its commit and the functions that produced them.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from posy.strategies.card import MethodCard
from posy.strategies.methods import settings_class

FEATURES, HIDDEN, CLASSES = 4, 5, 3
SIZES = (8, 6, 10)
"""Training samples n_i of the three clients. Each client's test samples are a copy of its training samples."""
SHARES = ((4, 4, 0), (0, 3, 3), (5, 2, 3))
"""Training samples by client and class."""
STEPS, LR, ROUNDS = 2, 0.1, 2
"""Steps of local training in a round (each on all samples), learning rate, rounds."""
NAMES = ("0.weight", "0.bias", "2.weight", "2.bias")
"""Tensors of the network in ``network.py``, in the order of the flat vector."""


def samples() -> list[tuple[np.ndarray, np.ndarray]]:
    """Return each client's training samples: inputs ``(n_i, 4)`` and labels ``(n_i,)``.

    Over all clients each input has mean 0 and standard deviation 1, so standardisation changes nothing.
    """
    rng = np.random.default_rng(20)
    labels = [np.repeat(np.arange(CLASSES), counts) for counts in SHARES]
    y = np.concatenate(labels)
    x = rng.normal(0, 1, (CLASSES, FEATURES))[y] + rng.normal(0, 1, (len(y), FEATURES))
    x = ((x - x.mean(0)) / x.std(0)).astype(np.float32)
    stops = np.cumsum(SIZES)
    return [(x[stop - n : stop], classes) for stop, n, classes in zip(stops, SIZES, labels, strict=True)]


def weights(number: int = 0) -> dict[str, np.ndarray]:
    """Return the tensors of one of several initial models, by the names in :data:`NAMES`."""
    rng = np.random.default_rng(30 + number)
    shapes = ((HIDDEN, FEATURES), (HIDDEN,), (CLASSES, HIDDEN), (CLASSES,))
    return {n: rng.uniform(-0.5, 0.5, shape).astype(np.float32) for n, shape in zip(NAMES, shapes, strict=True)}


def flat(tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the tensors of a model as Posy's flat vector ``(43,)``."""
    return np.concatenate([np.asarray(tensors[name], np.float32).ravel() for name in NAMES])


def config(method: str, folder: Path, **settings: Any) -> dict[str, Any]:
    """Write the problem's files to a folder and return the run config of a method. Settings have underscores."""
    x, y = (np.concatenate(parts) for parts in zip(*samples(), strict=True))
    np.savez(folder / "problem.npz", x_train=np.concatenate([x, x]), y_train=np.concatenate([y, y]))
    starts = np.cumsum((0, *SIZES[:-1]))
    train = [list(range(start, start + n)) for start, n in zip(starts.tolist(), SIZES, strict=True)]
    test = [[len(y) + index for index in part] for part in train]
    (folder / "parts.json").write_text(json.dumps({"train": train, "test": test}))
    save_file(weights(), folder / "start.safetensors")
    base = {
        "method": method,
        "dataset": str(folder / "problem.npz"),
        "partition": "file",
        "partition-file": str(folder / "parts.json"),
        "num-clients": len(SIZES),
        "num-server-rounds": ROUNDS,
        "model": f"{Path(__file__).with_name('network.py')}:perceptron",
        "weights": str(folder / "start.safetensors"),
        "batch-size": max(SIZES),
        "local-epochs": STEPS,
        "lr": LR,
        "device": "cpu",
        "stack": "loop",
        "output-dir": str(folder / "runs"),
        "run-name": "run",
    }
    return base | {key.replace("_", "-"): value for key, value in settings.items()}


def check(method: str, pairs: Sequence[tuple[Any, Any]]) -> None:
    """Compare Posy's arrays with the published program's. The method's card states the largest difference."""
    card: MethodCard = settings_class(method).card
    assert card.program is not None and card.program.difference <= 1e-5
    for posy, program in pairs:
        assert np.shape(posy) == np.shape(program)
    differences = [float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max()) for a, b in pairs]
    assert max(differences) <= card.program.difference, differences
