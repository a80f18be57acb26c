"""Picture of FedDRM: the routing of test samples."""

from pathlib import Path

from posy import figures
from posy.strategies.feddrm import FedDRM


def draw(strategy: FedDRM, folder: Path) -> None:
    """Draw the routing matrix: true client by chosen client."""
    if strategy.routed is not None:
        panel = figures.Panel(strategy.routed, xlabel="chosen client", ylabel="true client", label="samples")
        figures.heatmaps([panel], folder / "routing.png", title="Routing of the pooled test samples")
