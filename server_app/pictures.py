"""Draw a run's figures: the partition, the metric over the rounds, the clients, and figures specific to the method."""

import time
from logging import WARNING

from flwr.common.logger import log

from posy import figure_style as style
from posy import figures
from posy.client_app.workspace import Workspace
from posy.metrics import CLASSES, LABELS, column_of
from posy.server_app.federation import Federation
from posy.server_app.results import RunDirectory
from posy.server_app.system import SystemAccuracy
from posy.server_app.totals import Totals
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.columns import POINTS
from posy.strategies.methods import drawing_of

DRAW_SECONDS = 30.0
"""Minimum number of seconds between two plots of the metric over the rounds."""


class Pictures:
    """Draws a run's figures into the folder ``figures`` in its directory.

    Parameters
    ----------
    directory : RunDirectory
        The directory of the run.
    strategy : PersonalisedStrategy
        The strategy, which receives the number of training samples per client and class if the server knows it.
    workspace : Workspace
        The clients' data.
    federation : Federation
        The run's clients. Sites with local data may report their number of samples per class.
    """

    def __init__(
        self, directory: RunDirectory, strategy: PersonalisedStrategy, workspace: Workspace, federation: Federation
    ) -> None:
        self.directory = directory
        self.strategy = strategy
        self.workspace = workspace
        self.federation = federation
        self._drawn = 0.0

    @property
    def due(self) -> bool:
        """Whether it is time to plot the metric over the rounds again."""
        return time.perf_counter() - self._drawn > DRAW_SECONDS

    def draw_partition(self) -> None:
        """Write and plot each client's number of samples per class or label, and pass class counts to the strategy."""
        task, counts, names = self.workspace.task, None, self.workspace.task.class_names
        if self.workspace.of_sites:
            counts = self.strategy.class_counts = self.federation.class_counts()
        elif task.target == CLASSES:
            labels = self.workspace.dataset.y, task.num_classes
            counts = self.workspace.partition.counts(*labels)
            self.strategy.class_counts = self.workspace.partition.train_counts(*labels)
        elif task.target == LABELS:
            counts = self.workspace.partition.label_counts(self.workspace.dataset.y)
        else:
            counts, names = self.workspace.partition.sizes(), ("samples",)
        if counts is not None:
            self.directory.write_partition(counts, names)
            figures.partition(counts, self.directory.figures / "partition.png", class_names=names)

    def draw(self, totals: Totals, system: SystemAccuracy | None = None, *, final: bool = False) -> None:
        """Draw the figures; if an error occurs, log a warning, and let the run continue.

        Parameters
        ----------
        totals : Totals
            The scores of the finished rounds.
        system : SystemAccuracy, optional
            The accuracy of the federation as a whole.
        final : bool
            Whether the run has ended. Until then, only the metric over the rounds is plotted.
        """
        folder = self.directory.figures
        try:
            metric, run = self.strategy.rounds.metric, self.strategy.settings.run
            colours = style.point_colours(run.method, self.strategy.method.point)
            figures.over_rounds(totals.scores, folder / f"{metric.name}.png", metric, colours)
            if final:
                figures.over_rounds(totals.loss, folder / "loss.png", colours=colours)
                served, local = (
                    [totals.clients.get(c, {}).get(column) for c in range(self.strategy.num_clients)]
                    for column in (column_of(point, metric.name) for point in POINTS)
                )
                figures.client_scores(served, local, folder / "clients.png", metric, colours)
                if system and system.routed is not None:
                    figures.routing(system.routed, folder / "routing.png")
                if draw := drawing_of(type(self.strategy)):
                    draw(self.strategy, folder)
        except (ValueError, OSError, ArithmeticError) as error:
            log(WARNING, "a figure could not be drawn: %r", error)
        self._drawn = time.perf_counter()
