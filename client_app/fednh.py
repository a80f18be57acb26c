"""FedNH's client: it trains the body under fixed class prototypes, and tells in which directions its classes lie."""

import torch.nn.functional as F
from torch import Tensor

from posy.client_app.base import Config, PersonalClient, Result, Steps
from posy.client_app.training.work import Forward, Train, Trained
from posy.strategies.replies import Update


class FedNHClient(PersonalClient):
    """Train all but the head; send in its place the classes' mean directions (Algorithm 1).

    The local model is the trained body under the prototypes that it was trained with.
    """

    def local_round(self, received: list[Tensor], config: Config) -> Steps[Result]:
        """Train the body, then describe the training samples with it."""
        trained: Trained = yield Train(received[0], rates={"head": 0.0})
        features, _ = yield Forward(trained.parameters, "train", features=True)
        sent = trained.parameters.clone()
        means = mean_directions(features, self.data.y_train, self.data.num_classes)
        self.layout.views(sent)["head.weight"].copy_(means)
        return Update([sent], trained.loss), self.plain(trained.parameters)


def mean_directions(features: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Return the direction of each class's mean normalised feature, as long as the class's share of the samples.

    The mean of these over clients, weighted by their samples, weighs each class by how many samples they have of it
    (the paper sends these numbers by themselves).

    Parameters
    ----------
    features : torch.Tensor, (n, D)
        What the head sees of the samples.
    labels : torch.Tensor, (n,)
        Their classes.
    num_classes : int
        C.

    Returns
    -------
    torch.Tensor, (C, D)
        0 for a class without samples.
    """
    members = F.one_hot(labels, num_classes).to(features.dtype)
    sums = members.T @ F.normalize(features)
    return members.mean(dim=0)[:, None] * F.normalize(sums)
