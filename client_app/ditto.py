"""The Ditto client trains the global model for the server and a personal model for itself."""

from posy.client_app.base import PersonalClient
from posy.client_app.hooks import Config, Received, Result, Steps
from posy.client_app.training.work import Pull, Train, Trained
from posy.strategies.ditto import DittoSettings
from posy.strategies.replies import Update

GLOBAL, PERSONAL = 0, 1  # values of Train.stream


class DittoClient(PersonalClient):
    """Minimise F_i(v) + lambda/2 ||v - w||^2 over the personal v (Ditto, Algorithm 1)."""

    method: DittoSettings

    def local_round(self, received: Received, config: Config) -> Steps[Result]:
        """Train the global model, then the personal model, regularised towards the received model."""
        shared: Trained = yield Train(received["model"], stream=GLOBAL)
        first = self.initial() if self.method.start == "initial" else received["model"]
        personal: Trained = yield Train(
            self.kept_model(first),
            pull=Pull(received["model"], self.method.strength),
            epochs=self.method.epochs or None,
            stream=PERSONAL,
        )
        return Update({"model": shared.parameters}, personal.loss), self.keep_model(personal.parameters)
