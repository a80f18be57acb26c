"""Pictures of FedFew: the objective, and the clients' losses and weights for each model."""

from pathlib import Path

from posy import figures
from posy.strategies.fedfew import FedFew


def draw(strategy: FedFew, folder: Path) -> None:
    """Draw the objective, and the clients' losses and weights for each model."""
    objectives = [(number, objective) for number, objective in strategy.objectives.tolist()]
    figures.lines({"g": objectives}, folder / "objective.png", title="STCH-Set objective", ylabel="g")
    figures.heatmaps(
        [
            figures.Panel(strategy.losses, title="training loss", xlabel="server model", ylabel="client"),
            figures.Panel(strategy.weights, title="inner weight w_ik", xlabel="server model", ylabel="client"),
        ],
        folder / "models.png",
        title="Clients and server models in their last round",
    )
