"""Pictures of cwFedAvg: the norms of the output weights, and the class distributions."""

from pathlib import Path

import numpy as np

from posy import figures
from posy.strategies.cwfedavg import CwFedAvg


def draw(strategy: CwFedAvg, folder: Path) -> None:
    """Draw the output-row norms of the local and class models (Fig. 3), and p̃ against p (Fig. 8)."""
    panels = [figures.Panel(strategy.local_norms, title="local models: row norms", xlabel="class", ylabel="client")]
    if strategy.class_counts is not None:
        panels.insert(0, figures.Panel(strategy.class_counts, title="samples", xlabel="class", ylabel="client"))
        share = strategy.class_counts / strategy.class_counts.sum(axis=1, keepdims=True)
        names = {"xlabel": "empirical p", "ylabel": "read off the weights"}
        path, title = folder / "distribution.png", "Class distribution of the clients"
        figures.scatter(share, strategy.distributions, path, title=title, **names)
    models = strategy.classwise.put(np.zeros((strategy.num_classes, strategy.size), np.float32), strategy.class_models)
    norms = np.linalg.norm(strategy.output_weights(models), axis=2)
    panels.append(figures.Panel(norms, title="class models: row norms", xlabel="row", ylabel="class model"))
    figures.heatmaps(panels, folder / "norms.png", title="Data and output weights")
