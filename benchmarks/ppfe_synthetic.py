"""PPFE on synthetic linear regression (the paper's Section 6.1, Fig. 3), in closed form.

Client k has y = W_k^T x + e with W_k = (1 - r_p) W_g + r_p W_l^(k) (Eqs. 15 and 16). Every stage is a ridge
regression solved exactly. Stage 1 averages the clients' ridge solutions; each of the three later stages
fits what the ensemble so far leaves over, on each client alone, with a penalty that shrinks from stage to
stage: its heads are larger, its residuals smaller. Penalties are chosen on 20 % of a client's training data.
Compared with ridge on each client alone and with the average alone.

The paper does not give the input dimension, the noise, or alpha_k; they are options here. Prints JSON.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import typer

from posy import figures

Array = npt.NDArray[np.float64]
GRID = np.logspace(-3, 4, 15)
STAGES = 4


class Client(NamedTuple):
    """One client's data: training part, validation part (20 % of the training data), test."""

    x: Array
    y: Array
    x_val: Array
    y_val: Array
    x_test: Array
    y_test: Array


def draw_clients(
    rng: np.random.Generator, count: int, samples: int, dimension: int, ratio: float | None, noise: float
) -> list[Client]:
    """Draw the clients; ``ratio`` None draws each client's own r_p from U(0, 1)."""
    shared = rng.standard_normal(dimension)
    clients = []
    for _ in range(count):
        r = rng.random() if ratio is None else ratio
        weights = (1 - r) * shared + r * rng.standard_normal(dimension)
        x = rng.standard_normal((2 * samples, dimension))
        y = x @ weights + noise * rng.standard_normal(2 * samples)
        cut = round(0.8 * samples)
        clients.append(Client(x[:cut], y[:cut], x[cut:samples], y[cut:samples], x[samples:], y[samples:]))
    return clients


def ridge(x: Array, y: Array, penalty: float) -> Array:
    """Return argmin_w ||y - X w||^2 + penalty ||w||^2."""
    return np.linalg.solve(x.T @ x + penalty * np.eye(x.shape[1]), x.T @ y).astype(np.float64, copy=False)


def best_ridge(client: Client, before: Array, grid: Array) -> tuple[Array, float]:
    """Fit what ``before`` leaves over with the penalty that validates best; none at all is one choice."""
    left, left_val = client.y - client.x @ before, client.y_val - client.x_val @ before
    best, best_penalty, lowest = np.zeros_like(before), np.inf, float(np.mean(left_val**2))
    for penalty in grid:
        step = ridge(client.x, left, penalty)
        error = float(np.mean((left_val - client.x_val @ step) ** 2))
        if error < lowest:
            best, best_penalty, lowest = step, float(penalty), error
    return best, best_penalty


def test_error(client: Client, weights: Array) -> float:
    """Return the mean squared error on the client's test data."""
    return float(np.mean((client.y_test - client.x_test @ weights) ** 2))


def compare(clients: list[Client]) -> dict[str, float]:
    """Return the mean test error over the clients of PPFE, the average, and ridge alone."""
    zero = np.zeros(clients[0].x.shape[1])
    alone = [best_ridge(client, zero, GRID)[0] for client in clients]
    average = np.mean(alone, axis=0)
    ensembles = []
    for client in clients:
        weights, ceiling = average, GRID[-1]
        for _ in range(1, STAGES):
            step, penalty = best_ridge(client, weights, GRID[ceiling >= GRID])
            weights = weights + step
            ceiling = min(ceiling, penalty) / 2  # less and less regularised
        ensembles.append(weights)
    return {
        "ppfe": float(np.mean([test_error(c, w) for c, w in zip(clients, ensembles, strict=True)])),
        "fedavg": float(np.mean([test_error(c, average) for c in clients])),
        "local": float(np.mean([test_error(c, w) for c, w in zip(clients, alone, strict=True)])),
    }


def main(
    repeats: int = 5, dimension: int = 100, samples: int = 200, noise: float = 1.0, figure: Path | None = None
) -> None:
    """Vary the number of clients, then the personalisation ratio."""

    def average(count: int, ratio: float | None) -> dict[str, float]:
        generators = map(np.random.default_rng, range(repeats))
        rows = [compare(draw_clients(rng, count, samples, dimension, ratio, noise)) for rng in generators]
        return {name: round(float(np.mean([row[name] for row in rows])), 4) for name in rows[0]}

    by_clients = {count: average(count, 0.3) for count in (20, 50, 100, 200)}
    by_ratio: dict[Any, dict[str, float]] = {ratio: average(100, ratio) for ratio in (0.0, 0.25, 0.5, 0.75, 1.0)}
    by_ratio["uniform"] = average(100, None)
    if figure:
        curves = {m: [(r, e[m]) for r, e in by_ratio.items() if r != "uniform"] for m in ("ppfe", "fedavg", "local")}
        title, xlabel = "Synthetic regression", "personalisation ratio r_p"
        figures.lines(curves, figure, title=title, xlabel=xlabel, ylabel="test MSE", logy=True)
    print(
        json.dumps({"test MSE by clients, r_p = 0.3": by_clients, "test MSE by r_p, 100 clients": by_ratio}, indent=2)
    )


if __name__ == "__main__":
    typer.run(main)
