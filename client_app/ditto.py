"""Ditto's client: it trains the global model for the server and its own for itself."""

from torch import Tensor

from posy.client_app.base import Config, Predictor, Steps, Update, array_of
from posy.client_app.fedavg import FedAvgClient
from posy.client_app.training.work import Pull, Train, Trained

GLOBAL, PERSONAL = 0, 1  # streams of batches


class DittoClient(FedAvgClient):
    """Minimise F_i(v) + lambda/2 ||v - w||^2 over the personal v (Ditto, Algorithm 1)."""

    def local_round(self, received: list[Tensor], config: Config) -> Steps[Update]:
        """Train the global model, then the personal one towards the received model."""
        received_model = received[0]
        shared: Trained = yield Train(received_model, stream=GLOBAL)
        kept = self.recall("personal")
        personal: Trained = yield Train(
            received_model if kept is None else kept,
            pull=Pull(received_model, self.method.strength),
            epochs=self.method.epochs or None,
            stream=PERSONAL,
        )
        self.keep("personal", personal.parameters)
        return Update([array_of(shared.parameters)], float(personal.loss), self.plain(personal.parameters))

    def personal_model(self, received: list[Tensor], config: Config) -> Steps[Predictor | None]:
        """Return the kept personal model."""
        kept = self.recall("personal")
        yield from ()
        return None if kept is None else self.plain(kept)
