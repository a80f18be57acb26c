"""IFCA's client: it trains the cluster model with the lowest loss on its training data."""

from posy.client_app.base import PersonalClient
from posy.client_app.hooks import Config, Received, Result, Steps
from posy.client_app.predictors import Predictor
from posy.client_app.training.work import Train, Trained
from posy.strategies.replies import Update


class IFCAClient(PersonalClient):
    """Estimate the cluster, then train its model (IFCA, Algorithm 1, lines 6-8)."""

    def served_model(self, received: Received, config: Config) -> Steps[Predictor]:
        """Choose among the K models by training loss."""
        return self.best_of(received["models"])

    def local_round(self, received: Received, config: Config) -> Steps[Result]:
        """Train the chosen model and name its cluster."""
        served = yield from self.best_of(received["models"])
        trained: Trained = yield Train(served.members[0].parameters)
        local = self.plain(trained.parameters, served.chosen)
        return Update({"model": trained.parameters, "cluster": int(served.chosen)}, trained.loss), local
