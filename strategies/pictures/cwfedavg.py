"""Pictures of cwFedAvg: the norms of the output weights, and the class distributions."""

from pathlib import Path

import numpy as np

from posy import figure_style as style
from posy import figures
from posy.strategies.cwfedavg import CwFedAvg


def draw(strategy: CwFedAvg, folder: Path) -> None:
    """Draw the output-row norms of the local and class models (Fig. 3), and p̃ against p (Fig. 8)."""
    norm = "norm of the output row"
    panels = [figures.Panel(strategy.local_norms, "local models", "class", "client", norm)]
    if strategy.class_counts is not None:
        panels.insert(0, figures.Panel(strategy.class_counts, "samples", "class", "client", "samples", counts=True))
        share = strategy.class_counts / strategy.class_counts.sum(axis=1, keepdims=True)
        names = {"xlabel": "share of the class in the samples, p", "ylabel": "share read off the weights, p̃"}
        path, title = folder / "distribution.png", "Class distribution of the clients"
        colour = style.method_colour("cwfedavg")
        figures.scatter(share, strategy.distributions, path, title=title, colour=colour, **names)
    models = strategy.classwise.put(np.zeros((strategy.num_classes, strategy.size), np.float32), strategy.class_models)
    norms = np.linalg.norm(strategy.output_weights(models), axis=2)
    panels.append(figures.Panel(norms, "class models", "row of the output layer", "class model", norm))
    figures.heatmaps(panels, folder / "norms.png", title="Data and output weights")
