"""The FedMTL client trains its own model, regularised towards the other clients' models."""

from posy.client_app.base import PersonalClient
from posy.client_app.hooks import Config, Received, Result, Steps
from posy.client_app.predictors import Predictor
from posy.client_app.training.work import Pull, Train, Trained
from posy.strategies.replies import Update


class FedMTLClient(PersonalClient):
    """Minimise F_i(w_i) + lambda/2 tr(W Omega W^T) over w_i (FedMTL, Eq. 1)."""

    def served_model(self, received: Received, config: Config) -> Predictor:
        """Return the client's own model. The server's message contains only the anchor of the regularisation term."""
        return self.plain(self.kept_model(self.initial()))

    def local_round(self, received: Received, config: Config) -> Steps[Result]:
        """Train the client's own model and send it."""
        pull = Pull(received["model"], config["tie"])
        trained: Trained = yield Train(self.kept_model(self.initial()), pull=pull)
        return Update({"model": trained.parameters}, trained.loss), self.keep_model(trained.parameters)
