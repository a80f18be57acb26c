"""Compare Posy with the programs of ``benchmarks.plain``, independent implementations of the same papers.

Each client's samples form one batch, so both programs take the same steps.
"""

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import curves, plain
from posy.client_app.local_run import LocalRun
from posy.client_app.workspace import Workspace
from posy.randomness import model_seed
from posy.strategies.registry import read_settings

ROUNDS, CLASSES, LR = 4, 3, 0.2
EPOCHS, BATCH = 2, 200
CONSTANTS: dict[str, dict[str, float]] = {
    # The step is the rate times lambda. The programs start the search for theta differently after the first batch.
    "pfedme": {"LR": 0.02, "EPOCHS": 1},
    "per-fedavg": {"PER_ALPHA": 0.3},
    "fedamp": {"AMP_ALPHA": 3.0, "AMP_LAMBDA": 1.0, "AMP_SIGMA": 10.0},  # the models differ more than in the curves
    "fedfomo": {"FOMO_MODELS": 2, "FOMO_EPSILON": 0.0},  # all others
    "fedala": {"ALA_SAMPLE": 1.0},
    "cfl": {"CFL_EPS1": 100.0, "CFL_EPS2": 0.01},  # a split in each of the first rounds
}
SETTINGS: dict[str, dict[str, float]] = {
    "fedrep": {"fedrep_head_epochs": EPOCHS},
    "fedbabu": {"fedbabu_epochs": EPOCHS},
    "pfedme": {"lr": 0.02, "local_epochs": 1},
    "per-fedavg": {"per_fedavg_alpha": 0.3},
    "fedamp": {"fedamp_alpha": 3.0, "fedamp_strength": 1.0, "fedamp_sigma": 10.0},
    "fedfomo": {"fedfomo_models": 2, "fedfomo_epsilon": 0.0},
    "fedala": {"fedala_sample": 1.0},
    "cfl": {"cfl_eps1": 100.0, "cfl_eps2": 0.01},
    "fedpac": {"fedpac_head_epochs": EPOCHS},
}
IN_CI = ("fedavg", "fedfew", "scaffold", "ditto", "fedala", "cfl")
SAME_SERVED_MODEL = ("fedavg", "fedfew", "fedprox", "scaffold")
"""Methods that serve the same model to every client."""


@pytest.fixture
def split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Return a function that writes images of three classes for three clients in PFLlib's format."""

    def write(identical: bool = False) -> Path:
        """Write the split; with ``identical`` each client has copies of one image, so that all batches are equal."""
        rng = np.random.default_rng(0)
        y = np.arange(150) % CLASSES
        x = np.broadcast_to(rng.integers(0, 120, (1 if identical else 150, 16, 16, 1)), (150, 16, 16, 1))
        x = (x + 60 * y[:, None, None, None]).astype(np.uint8)
        curves.write_split(tmp_path / "split", x, y, clients=3, alpha=0.01 if identical else 1.0, seed=0)
        for name, value in {"EPOCHS": EPOCHS, "BATCH": BATCH, "LR": LR}.items():
            monkeypatch.setattr(plain, name, value)
        return tmp_path / "split"

    return write


@pytest.fixture
def run_both(
    split: Callable[..., Path],
    make_config: Callable[..., Any],
    federate: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[str], Any]:
    """Return a function that runs a method in Posy and its plain program from the same initial models.

    It returns the scored models of both, ``(rounds, clients, d)``, and the initial model ``(d,)``.
    """
    scored_models: dict[tuple[str, int, int], np.ndarray] = {}

    def record_model(self: LocalRun, point: str, predictor: Any) -> Any:
        model = predictor.members[0].parameters.numpy().copy()
        scored_models[point, self.client.round, self.client.client] = model
        return scores(self, point, predictor)

    scores = LocalRun._scores
    monkeypatch.setattr(LocalRun, "_scores", record_model)

    def run(method: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        folder = split(identical=method == "per-fedavg")  # it divides its mini-batches
        for name, value in CONSTANTS.get(method, {}).items():
            monkeypatch.setattr(plain, name, value)
        settings = {"lr": LR, "local_epochs": EPOCHS} | curves.METHODS[method] | {"batch_size": BATCH}
        config = make_config(
            method, dataset=str(folder), partition="given", partition_file="", num_clients=3, model="cnn",
            num_server_rounds=ROUNDS, seed=42, **settings | SETTINGS.get(method, {}),
        )  # fmt: skip
        architecture = Workspace(read_settings(config)).architecture
        starts = [architecture.initial(model_seed(config["seed"], k)) for k in range(plain.MODELS)]
        clients = curves.read_split(folder)
        model = plain.network(clients[0].x_train[0], CLASSES)
        program = plain.PROGRAMS[method](model, [*map(torch.from_numpy, starts)], clients, plain.shares_of(clients))
        expected = [[flat(each) for each in scored] for scored in islice(program, ROUNDS)]
        federate(config)
        models = [[scored_models[curves.point_of(method), r, c] for c in range(3)] for r in range(1, ROUNDS + 1)]
        return np.array(models), np.array(expected), starts[0]

    return run


def flat(scored: plain.Scored) -> np.ndarray:
    """Return a model; for prototypes, the model with the output layer 2 f·c - ||c||², which selects the nearest."""
    if isinstance(scored, torch.Tensor):
        return scored.numpy()
    c = scored.prototypes
    body = scored.parameters[: -c.numel() - len(c)]
    return torch.cat([body, 2 * c.flatten(), -c.square().sum(1)]).numpy()


def test_both_programs_read_the_same_split(split: Callable[..., Path], make_config: Callable[..., Any]) -> None:
    folder = split()
    workspace = Workspace(read_settings(make_config("fedavg", dataset=str(folder), partition="given", num_clients=3)))
    for number, client in enumerate(curves.read_split(folder)):
        data = workspace.client_data(number)
        assert len(client.y_test) == pytest.approx(len(client.y_train) / 3, abs=1)
        for name in ("x_train", "y_train", "x_test", "y_test"):
            torch.testing.assert_close(getattr(data, name), getattr(client, name))


@pytest.mark.parametrize(
    "method", [m if m in IN_CI else pytest.param(m, marks=pytest.mark.slow) for m in curves.METHODS]
)
def test_models_match_the_plain_program(method: str, run_both: Callable[[str], Any]) -> None:
    torch.manual_seed(0)  # the order of a batch's samples affects the rounding of its sum
    models, expected, start = run_both(method)
    # Rounding decides between nearly equal inputs of a max-pooling, which changes a few parameters.
    close = np.isclose(models, expected, rtol=1e-4, atol=1e-4 if method == "fedproto" else 1e-5)
    assert close.mean() > 0.998 and np.abs(models - expected).max() < 1e-3
    assert (np.abs(expected - start).max(axis=2) > 0.001).all()  # the models have changed
    distinct = {tuple(np.round(model, 4)) for model in expected[-1]}
    assert len(distinct) == (1 if method in SAME_SERVED_MODEL else 3)


def test_stored_results_are_not_recomputed(tmp_path: Path) -> None:
    path, conditions = tmp_path / "work.jsonl", {"dataset": "mnist", "drop_last": False}
    curves.Work(path, conditions).add("fedper", "plain", 1, [0.25, 0.50004])
    again = curves.Work(path, conditions)
    assert again.missing("fedper", "plain", [0, 1, 2]) == [0, 2]
    assert again.missing("fedper", "posy", [1]) == [1]
    np.testing.assert_array_equal(again.table("fedper", "plain", [1]), [[0.25, 0.5]])
    assert curves.Work(path, conditions | {"drop_last": True}).missing("fedper", "plain", [1]) == [1]


def test_comparison_of_curves_by_hand() -> None:
    plain_curves, posy_curves = np.array([[0.1, 0.4], [0.3, 0.6]]), np.array([[0.3, 0.5], [0.5, 0.7]])
    comparison = curves.compared(plain_curves, posy_curves)
    assert comparison["gap"] == pytest.approx([0.2, 0.1]) and comparison["mean_gap"] == pytest.approx(0.15)
    assert comparison["spread_over_seeds"] == pytest.approx([0.02**0.5] * 2, abs=1e-4)
    assert comparison["largest_gap_in_spreads"] == pytest.approx(0.2 / 0.02**0.5, abs=1e-4)
    assert comparison["mean_gap_error"] == pytest.approx(0.02**0.5, abs=1e-4)  # two means of two curves each
