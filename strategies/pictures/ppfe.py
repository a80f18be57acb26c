"""Picture of PPFE: the coefficients of the stages."""

from pathlib import Path

from posy import figures
from posy.strategies.ppfe import PPFE


def draw(strategy: PPFE, folder: Path) -> None:
    """Draw the coefficients of the clients' stages; with secure aggregation the clients keep them."""
    if strategy.settings.run.secure_aggregation:
        return
    names = [f"stage {stage.number}" for stage in strategy.stages]
    panel = figures.Panel(strategy.betas, ylabel="client", label="beta", xticks=names)
    figures.heatmaps([panel], folder / "coefficients.png", title="Coefficients of the stages")
