"""The pooled client trains on the training samples of all clients."""

from dataclasses import replace

from posy.client_app.base import PersonalClient
from posy.client_app.hooks import Config, Received, Result, Steps
from posy.client_app.state import State
from posy.client_app.training.work import Trained
from posy.client_app.workspace import Workspace
from posy.strategies.cohorts import members_of


class PooledClient(PersonalClient):
    """Train one model on the training samples of all clients, and score it on this client's samples."""

    def __init__(self, client: int, workspace: Workspace, state: State) -> None:
        super().__init__(client, workspace, state)
        samples = workspace.pooled_samples(members_of(self.settings))
        self.data = replace(self.data, x_train=samples.x, y_train=samples.y)

    def local_round(self, received: Received, config: Config) -> Steps[Result]:
        """Train the model. No client has a local model."""
        trained: Trained = yield self.work(received["model"])
        update, _ = self.share(trained)
        return update, None
