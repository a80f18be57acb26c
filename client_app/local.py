"""Local training: each client trains its own model and does not send an update."""

from posy.client_app.base import PersonalClient
from posy.client_app.hooks import Config, Received, Result, Steps
from posy.client_app.training.work import Train, Trained
from posy.strategies.replies import Update


class LocalClient(PersonalClient):
    """Train the client's stored model, which starts from the common initial model."""

    def local_round(self, received: Received, config: Config) -> Steps[Result]:
        """Train the stored model and send nothing."""
        trained: Trained = yield Train(self.kept_model(self.initial()))
        return Update({}, trained.loss), self.keep_model(trained.parameters)
