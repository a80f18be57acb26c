"""The FedPAC client trains the head on the served body, then the body, whose features it pulls towards class means."""

import torch
from torch import Tensor

from posy.client_app.base import PersonalClient
from posy.client_app.hooks import Config, Received, Result, Steps
from posy.client_app.prototypes import class_means, towards_prototypes
from posy.client_app.training.work import Forward, Train, Trained
from posy.strategies.fedpac import FedPACSettings
from posy.strategies.replies import Update

HEAD, BODY = 0, 1  # values of Train.stream


class FedPACClient(PersonalClient):
    """Train the head, then the body, whose features are pulled towards the global class means (FedPAC, Algorithm 1)."""

    method: FedPACSettings

    def assembled(self, received: Received) -> Tensor:
        """Return the whole model ``(d,)``: the shared body, and the head that the server combined for the client."""
        model = torch.empty(self.layout.size, device=self.device)
        return self.personal.put(self.shared.put(model, received["model"]), received["head"])

    def local_round(self, received: Received, config: Config) -> Steps[Result]:
        """Compute statistics of the served body's features, train head and body, and send both with the statistics."""
        start = self.assembled(received)
        features, _ = yield Forward(start, "train", features=True)
        variance, products = statistics(features, self.data.y_train, self.data.num_classes)
        fixed_body = dict.fromkeys((layer for layer in self.layout.layers if layer != "head"), 0.0)
        epochs = None if self.settings.train.local_steps else self.method.head_epochs
        head: Trained = yield Train(start, rates=fixed_body, epochs=epochs, lr=self.method.head_lr or None, stream=HEAD)
        strength = torch.tensor(self.method.strength, device=self.device)
        context = {"prototypes": received["prototypes"], "known": received["known"], "lambda": strength}
        trained: Trained = yield Train(head.parameters, towards_prototypes, context, rates={"head": 0.0}, stream=BODY)
        features, _ = yield Forward(trained.parameters, "train", features=True)
        means, counts = class_means(features, self.data.y_train, self.data.num_classes)
        model, head = self.shared.take(trained.parameters), self.personal.take(trained.parameters)
        arrays = {
            "model": model, "head": head, "means": means, "counts": counts, "variance": variance, "products": products
        }  # fmt: skip
        return Update(arrays, trained.loss), self.plain(trained.parameters)


def statistics(features: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return the variance V ``()`` and the weighted class means h ``(C, D)`` of features ``(n, D)``.

    h contains each class's mean times the class's share of the samples. V = (E ||f||² − ||h||²) / n is the variance of
    h, which is estimated from n samples.
    """
    means, counts = class_means(features, labels, num_classes)
    products = means.double() * (counts / counts.sum()).double()[:, None]
    spread = features.double().square().sum(dim=1).mean() - products.square().sum()
    return (spread.clamp_min(0) / len(labels)).float(), products.float()
