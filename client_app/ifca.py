"""IFCA's client: it trains the cluster model with the lowest loss on its training data."""

import numpy as np
from torch import Tensor

from posy.client_app.base import Arrays, Config, PersonalClient, Predictor, Steps, Update, array_of
from posy.client_app.training.work import Train, Trained


class IFCAClient(PersonalClient):
    """Estimate the cluster, then train its model (IFCA, Algorithm 1, lines 6-8)."""

    def local_round(self, received: list[Tensor], config: Config) -> Steps[Update]:
        """Train the best fitting of the K models and name its cluster."""
        best = int((yield from self.train_losses(received[0])).argmin())
        trained: Trained = yield Train(received[0][best])
        arrays: Arrays = [array_of(trained.parameters), np.array(best, np.int64)]
        return Update(arrays, float(trained.loss), self.plain(trained.parameters, str(best)))

    def served_model(self, received: list[Tensor], config: Config) -> Steps[Predictor]:
        """Choose among the served models by training loss."""
        best = int((yield from self.train_losses(received[0])).argmin())
        return self.plain(received[0][best], str(best))
