"""Picture of PPFE: the coefficients of the stages."""

from pathlib import Path

import numpy as np

from posy import figures
from posy.storage import load_arrays
from posy.strategies.ppfe import PPFE


def draw(strategy: PPFE, folder: Path) -> None:
    """Draw the coefficients of the finished stages, read from the served models that a simulation's clients store."""
    models, stages = strategy.exchange.models_folder, strategy.stages
    if models is None or len(stages) < 2:
        return
    betas = np.full((strategy.num_clients, len(stages)), np.nan)
    for client in range(strategy.num_clients):
        path = models / f"served-{client}.safetensors"
        arrays = load_arrays(path) if path.exists() else {}
        for stage in range(1, len(strategy.finished) + 1):
            if (beta := arrays.get(f"stage{stage}.coefficient")) is not None:
                betas[client, stage - 1] = beta[0]
    if np.isnan(betas).all():
        return
    panel = figures.Panel(betas, ylabel="client", label="beta", xticks=[f"stage {stage.number}" for stage in stages])
    figures.heatmaps([panel], folder / "coefficients.png", title="Coefficients of the stages")
