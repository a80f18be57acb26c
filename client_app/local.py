"""Local training: the client goes on with its own model."""

from torch import Tensor

from posy.client_app.base import Config, PersonalClient, Predictor, Steps, Update
from posy.client_app.training.work import Train, Trained


class LocalClient(PersonalClient):
    """Train the model that the client keeps, from the common initialisation on."""

    def local_round(self, received: list[Tensor], config: Config) -> Steps[Update]:
        """Go on with the kept model; nothing is sent."""
        kept = self.recall("model")
        trained: Trained = yield Train(self.initial() if kept is None else kept)
        self.keep("model", trained.parameters)
        return Update([], float(trained.loss), self.plain(trained.parameters))

    def personal_model(self, received: list[Tensor], config: Config) -> Steps[Predictor | None]:
        """Return the kept model."""
        kept = self.recall("model")
        yield from ()
        return None if kept is None else self.plain(kept)
