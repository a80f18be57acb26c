"""Posy beside the plain programs of ``benchmarks.curves``, which share nothing with it but the papers.

Every client's samples are one batch, so that nothing is drawn: both must then take the same steps.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import curves
from posy.client_app.workspace import Workspace
from posy.randomness import model_seed
from posy.strategies.registry import read_settings

ROUNDS, CLASSES, LR = 4, 3, 0.2


@pytest.fixture
def split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write images of three classes as PFLlib would, for three clients."""
    rng = np.random.default_rng(0)
    y = np.arange(150) % CLASSES
    x = (rng.integers(0, 120, (150, 16, 16, 1)) + 60 * y[:, None, None, None]).astype(np.uint8)
    curves.write_split(tmp_path / "split", x, y, clients=3, alpha=1.0, seed=0)
    monkeypatch.setattr(curves, "BATCH", 200)
    monkeypatch.setattr(curves, "LR", LR)
    return tmp_path / "split"


@pytest.fixture
def both(split: Path, make_config: Callable[..., Any], federate: Callable[..., Any]) -> Callable[[str], Any]:
    """Return what runs a method in Posy, and its plain program from the same initial models."""

    def run(method: str) -> tuple[Any, list[np.ndarray]]:
        config = make_config(
            method, dataset=str(split), partition="given", partition_file="", num_clients=3, model="cnn",
            num_server_rounds=ROUNDS, batch_size=200, lr=LR, seed=42, **curves.METHODS[method],
        )  # fmt: skip
        architecture = Workspace(read_settings(config)).architecture
        seeds = [model_seed(config["seed"], k) for k in range(curves.MODELS)]
        starts = [torch.from_numpy(architecture.initial(seed)) for seed in seeds]
        clients = curves.read_split(split)
        model = curves.network(clients[0].x_train[0], CLASSES)
        program: Iterator[Any] = curves.PROGRAMS[method](model, starts, clients, curves.shares_of(clients))
        *_, served = islice(program, ROUNDS)
        return federate(config), [each.numpy() for each in served]

    return run


def test_the_split_is_read_alike(split: Path, make_config: Callable[..., Any]) -> None:
    workspace = Workspace(read_settings(make_config("fedavg", dataset=str(split), partition="given", num_clients=3)))
    for number, client in enumerate(curves.read_split(split)):
        ours = workspace.client_data(number)
        assert len(client.y_test) == pytest.approx(len(client.y_train) / 3, abs=1)
        for name in ("x_train", "y_train", "x_test", "y_test"):
            torch.testing.assert_close(getattr(ours, name), getattr(client, name))


@pytest.mark.parametrize("method", ["fedavg", "cwfedavg"])
def test_served_models_are_those_of_the_plain_program(method: str, both: Callable[[str], Any]) -> None:
    finished, served = both(method)
    for client, expected in enumerate(served):
        found = finished.strategy.serve(client)  # cwFedAvg: the head, which comes last, apart
        np.testing.assert_allclose(np.concatenate(found), expected, rtol=1e-4, atol=1e-5)
    distinct = {tuple(np.round(model, 4)) for model in served}
    assert len(distinct) == (1 if method == "fedavg" else 3)
    start = finished.strategy.initial()
    assert np.abs(served[0] - start).max() > 0.01  # they have moved


def test_fedfew_serves_what_the_plain_program_serves(both: Callable[[str], Any]) -> None:
    finished, served = both("fedfew")
    chosen = finished.column("chosen")[-1]
    for client, expected in enumerate(served):
        np.testing.assert_allclose(finished.strategy.models[int(chosen[client])], expected, rtol=1e-4, atol=1e-5)
