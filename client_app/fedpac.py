"""FedPAC's client: the head on the served body, then the body towards the global class means."""

import torch
from torch import Tensor

from posy.client_app.base import Config, Result, Steps
from posy.client_app.fedrep import BODY, FedRepClient
from posy.client_app.prototypes import class_means, towards_prototypes
from posy.client_app.training.work import Forward, Train
from posy.strategies.replies import Update


class FedPACClient(FedRepClient):
    """Train as FedRep does, the body drawn to the global class means."""

    def assembled(self, received: list[Tensor]) -> Tensor:
        """Return the whole model ``(d,)``: the shared body with the head that was combined for the client."""
        whole = torch.empty(self.layout.size, device=self.device)
        return self.personal.put(self.shared.put(whole, received[0]), received[1])

    def local_round(self, received: list[Tensor], config: Config) -> Steps[Result]:
        """Take the statistics of the served body, train head and body, and send all but the samples."""
        _, _, prototypes, known = received
        start = self.assembled(received)
        features, _ = yield Forward(start, "train", features=True)
        variance, products = statistics(features, self.data.y_train, self.data.num_classes)
        strength = torch.tensor(self.method.strength, device=self.device)
        context = {"prototypes": prototypes, "known": known, "lambda": strength}
        trained = yield from self.alternated(Train(start, towards_prototypes, context, stream=BODY))
        features, _ = yield Forward(trained.parameters, "train", features=True)
        means, counts = class_means(features, self.data.y_train, self.data.num_classes)
        body, head = self.shared.take(trained.parameters), self.personal.take(trained.parameters)
        return Update([body, head, means, counts, variance, products], trained.loss), self.plain(trained.parameters)


def statistics(features: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return V ``()`` and h ``(C, D)`` of features ``(n, D)``.

    h holds the mean of each class times its share of the samples, V the variance of that estimate:
    (E ||f||² − ||h||²) / n.
    """
    means, counts = class_means(features, labels, num_classes)
    products = means.double() * (counts / counts.sum()).double()[:, None]
    spread = features.double().square().sum(dim=1).mean() - products.square().sum()
    return (spread.clamp_min(0) / len(labels)).float(), products.float()
