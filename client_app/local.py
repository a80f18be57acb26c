"""Local training: the client goes on with its own model."""

from torch import Tensor

from posy.client_app.base import Config, PersonalClient, Result, Steps
from posy.client_app.training.work import Train, Trained
from posy.strategies.replies import Update


class LocalClient(PersonalClient):
    """Train the model that the client keeps, from the common initialisation on."""

    def local_round(self, received: list[Tensor], config: Config) -> Steps[Result]:
        """Go on with the kept model; nothing is sent."""
        trained: Trained = yield Train(self.kept_model(self.initial()))
        return Update([], trained.loss), self.keep_model(trained.parameters)
