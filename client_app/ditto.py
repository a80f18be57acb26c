"""Ditto's client: it trains the global model for the server and a personal one for itself."""

from torch import Tensor

from posy.client_app.base import Config, PersonalClient, Result, Steps
from posy.client_app.training.work import Pull, Train, Trained
from posy.strategies.replies import Update

GLOBAL, PERSONAL = 0, 1  # streams of batches


class DittoClient(PersonalClient):
    """Minimise F_i(v) + lambda/2 ||v - w||^2 over the personal v (Ditto, Algorithm 1)."""

    def local_round(self, received: list[Tensor], config: Config) -> Steps[Result]:
        """Train the global model, then the personal one towards the received model."""
        shared: Trained = yield Train(received[0], stream=GLOBAL)
        first = self.initial() if self.method.start == "initial" else received[0]
        personal: Trained = yield Train(
            self.kept_model(first),
            pull=Pull(received[0], self.method.strength),
            epochs=self.method.epochs or None,
            stream=PERSONAL,
        )
        return Update([shared.parameters], personal.loss), self.keep_model(personal.parameters)
