"""The IFCA client trains the cluster model with the lowest loss on the client's training data."""

from posy.client_app.base import PersonalClient
from posy.client_app.hooks import Config, Received, Result, Steps
from posy.client_app.predictors import Predictor
from posy.client_app.training.work import Train, Trained
from posy.strategies.replies import Update


class IFCAClient(PersonalClient):
    """Estimate the client's cluster, then train the model of this cluster (IFCA, Algorithm 1, lines 6-8)."""

    def served_model(self, received: Received, config: Config) -> Steps[Predictor]:
        """Return the model with the lowest training loss among the K cluster models."""
        return self.best_of(received["models"])

    def local_round(self, received: Received, config: Config) -> Steps[Result]:
        """Train the chosen model, and send it with the index of its cluster."""
        served = yield from self.best_of(received["models"])
        trained: Trained = yield Train(served.members[0].parameters)
        local = self.plain(trained.parameters, served.chosen)
        return Update({"model": trained.parameters, "cluster": int(served.chosen)}, trained.loss), local
