"""Pictures of FedFew: the objective, and the clients' losses and weights for each model."""

from pathlib import Path

from posy import figure_style as style
from posy import figures
from posy.strategies.fedfew import FedFew


def draw(strategy: FedFew, folder: Path) -> None:
    """Draw the objective, and the clients' losses and weights for each model."""
    objectives = [(number, objective) for number, objective in strategy.objectives.tolist()]
    colours, path = {"FedFew": style.method_colour("fedfew")}, folder / "objective.png"
    figures.lines({"FedFew": objectives}, path, title="STCH-Set objective", ylabel="objective g", colours=colours)
    figures.heatmaps(
        [
            figures.Panel(strategy.losses, "training loss", "server model", "client", "loss"),
            figures.Panel(strategy.weights, "inner weight", "server model", "client", "weight w_ik"),
        ],
        folder / "models.png",
        title="Clients and server models in their last round",
    )
