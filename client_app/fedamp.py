"""FedAMP's client: it goes on with its own model, pulled towards the message u_i."""

from torch import Tensor

from posy.client_app.base import Config, PersonalClient, Predictor, Steps, Update, array_of
from posy.client_app.training.work import Pull, Train, Trained


class FedAMPClient(PersonalClient):
    """Minimise F_i(w) + lambda / (2 alpha) ||w - u_i||^2 (FedAMP, Eq. 4)."""

    def local_round(self, received: list[Tensor], config: Config) -> Steps[Update]:
        """Train the client's own model and send it."""
        kept = self.recall("model")
        pull = Pull(received[0], self.method.strength / self.method.alpha)
        trained: Trained = yield Train(received[0] if kept is None else kept, pull=pull)
        self.keep("model", trained.parameters)
        return Update([array_of(trained.parameters)], float(trained.loss), self.plain(trained.parameters))

    def personal_model(self, received: list[Tensor], config: Config) -> Steps[Predictor | None]:
        """Return the client's own model."""
        kept = self.recall("model")
        yield from ()
        return None if kept is None else self.plain(kept)
