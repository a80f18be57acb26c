"""Pictures of FedACS, FedAMP and FedMTL: the attention between the clients."""

from pathlib import Path

import numpy as np

from posy import figures
from posy.strategies.attention import AttentionStrategy


def draw(strategy: AttentionStrategy, folder: Path) -> None:
    """Draw the attention matrix over the rounds, with similar clients next to each other."""
    if not len(strategy.pictured):
        return
    counts = strategy.class_counts
    order = np.arange(strategy.num_clients) if counts is None else figures.similarity_order(counts)
    panels = [
        figures.Panel(matrix[np.ix_(order, order)], f"round {number}", "client j", "client i", "attention")
        for number, matrix in zip(strategy.pictured, strategy.pictures, strict=True)
    ]
    figures.heatmaps(panels, folder / "attention.png", title="Attention between clients, ordered by data similarity")
