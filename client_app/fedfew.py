"""The FedFew client trains all K models and reports their losses."""

import torch
from torch import Tensor

from posy.client_app.base import PersonalClient
from posy.client_app.hooks import Config, Received, Result, Steps
from posy.client_app.predictors import Predictor
from posy.client_app.training.work import Train, Trained
from posy.strategies.fedfew import FedFewSettings
from posy.strategies.replies import Update


class FedFewClient(PersonalClient):
    """Train θ_1..θ_K, and send Δ_ik = θ_k^local − θ_k and L_ik (Algorithm 1, lines 3-11)."""

    method: FedFewSettings

    def local_round(self, received: Received, config: Config) -> Steps[Result]:
        """Train the K models, and send their changes and losses."""
        start = self.assembled(received)
        trained: Trained = yield Train(start, own_batches=self.method.batches == "own")
        self.keep_personal(trained.parameters)
        delta = self.shared.take(trained.parameters - start)
        best = int(trained.loss.argmin())
        return Update({"models": delta, "losses": trained.loss}, trained.loss[best]), self.plain(
            trained.parameters[best], str(best)
        )

    def served_model(self, received: Received, config: Config) -> Steps[Predictor]:
        """Return the served model k_i with the lowest training loss (Algorithm 1, lines 19-24)."""
        return self.best_of(self.assembled(received))

    def assembled(self, received: Received) -> Tensor:
        """Return the K models ``(K, d)`` with the received shared layers and the client's personal layers."""
        distinct = self.method.initialisation == "distinct"
        fresh = torch.stack([self.initial(k if distinct else 0) for k in range(self.method.models)])
        return self.shared.put(self.with_personal(fresh), received["models"])
