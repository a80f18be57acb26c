"""IFCA's client: it trains the cluster model with the lowest loss on its training data."""

from torch import Tensor

from posy.client_app.base import Config, PersonalClient, Predictor, Result, Steps
from posy.client_app.training.work import Train, Trained
from posy.strategies.replies import Update


class IFCAClient(PersonalClient):
    """Estimate the cluster, then train its model (IFCA, Algorithm 1, lines 6-8)."""

    def served_model(self, received: list[Tensor], config: Config) -> Steps[Predictor]:
        """Choose among the K models by training loss."""
        return self.best_of(received[0])

    def local_round(self, received: list[Tensor], config: Config) -> Steps[Result]:
        """Train the chosen model and name its cluster."""
        served = yield from self.best_of(received[0])
        trained: Trained = yield Train(served.members[0].parameters)
        local = self.plain(trained.parameters, served.chosen)
        return Update([trained.parameters, int(served.chosen)], trained.loss), local
