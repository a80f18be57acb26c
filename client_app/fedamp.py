"""FedAMP's client: it goes on with its own model, pulled towards the message u_i."""

from torch import Tensor

from posy.client_app.base import Config, PersonalClient, Result, Steps
from posy.client_app.training.work import Pull, Train, Trained
from posy.strategies.replies import Update


class FedAMPClient(PersonalClient):
    """Minimise F_i(w) + lambda / (2 alpha) ||w - u_i||^2 (FedAMP, Eq. 4)."""

    def local_round(self, received: list[Tensor], config: Config) -> Steps[Result]:
        """Train the client's own model and send it."""
        pull = Pull(received[0], self.method.strength / self.method.alpha)
        trained: Trained = yield Train(self.kept_model(received[0]), pull=pull)
        return Update([trained.parameters], trained.loss), self.keep_model(trained.parameters)
