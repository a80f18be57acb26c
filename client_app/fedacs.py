"""The FedACS client trains from the intermediate model and stores the result."""

from posy.client_app.base import PersonalClient
from posy.client_app.hooks import Config, Received, Result, Steps
from posy.client_app.training.work import Train, Trained
from posy.strategies.replies import Update


class FedACSClient(PersonalClient):
    """Take local steps from u_i (Eq. 5). The result w_i is the client's personalised model."""

    def local_round(self, received: Received, config: Config) -> Steps[Result]:
        """Train from u_i, then send and store the result w_i."""
        trained: Trained = yield Train(received["model"])
        return Update({"model": trained.parameters}, trained.loss), self.keep_model(trained.parameters)
