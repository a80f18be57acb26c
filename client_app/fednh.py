"""The FedNH client trains the body under fixed class prototypes, and sends the mean direction of each class."""

import torch.nn.functional as F
from torch import Tensor

from posy.client_app.base import PersonalClient
from posy.client_app.hooks import Config, Received, Result, Steps
from posy.client_app.training.work import Forward, Train, Trained
from posy.strategies.replies import Update


class FedNHClient(PersonalClient):
    """Train all layers except the head, and send the model with the mean direction of each class (Algorithm 1).

    The local model is the trained body, with the prototypes as its head.
    """

    def local_round(self, received: Received, config: Config) -> Steps[Result]:
        """Train the body, then compute the mean direction of each class from its features."""
        trained: Trained = yield Train(received["model"], rates={"head": 0.0})
        features, _ = yield Forward(trained.parameters, "train", features=True)
        means = mean_directions(features, self.data.y_train, self.data.num_classes)
        return Update({"model": trained.parameters, "directions": means}, trained.loss), self.plain(trained.parameters)


def mean_directions(features: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Return each class's mean normalised feature, rescaled so that its length is the class's share of the samples.

    The server's mean, weighted by n_i, then weights the clients' directions for a class by the sample counts n_ic. In
    the paper, clients send n_ic separately.

    Parameters
    ----------
    features : torch.Tensor, (n, D)
        The head's inputs for the samples.
    labels : torch.Tensor, (n,)
        Classes of the samples.
    num_classes : int
        Number of classes C.

    Returns
    -------
    torch.Tensor, (C, D)
        The scaled directions, with 0 for a class without samples.
    """
    members = F.one_hot(labels, num_classes).to(features.dtype)
    sums = members.T @ F.normalize(features)
    return members.mean(dim=0)[:, None] * F.normalize(sums)
