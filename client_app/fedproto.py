"""FedProto's client: it keeps its network, and is drawn to the prototypes of all."""

import torch
from torch import Tensor

from posy.client_app.base import Config, PersonalClient, Predictor, Result, Steps
from posy.client_app.prototypes import class_means, towards_prototypes
from posy.client_app.training.work import Forward, Train, Trained
from posy.strategies.replies import Update

UNKNOWN = -1e9
"""The output for a class without a prototype."""


class FedProtoClient(PersonalClient):
    """Minimise cross-entropy + λ times the distance of features to the prototypes (FedProto, Eq. 7)."""

    def local_round(self, received: list[Tensor], config: Config) -> Steps[Result]:
        """Train the client's own network; send its prototypes, and how many samples are behind each."""
        prototypes, known = received
        strength = torch.tensor(self.method.strength, device=self.device)
        context = {"prototypes": prototypes, "known": known, "lambda": strength}
        trained: Trained = yield Train(self.kept_model(self.initial()), towards_prototypes, context)
        features, _ = yield Forward(trained.parameters, "train", features=True)
        means, counts = class_means(features, self.data.y_train, self.data.num_classes)
        # Of classes that it does not have, the client sends what it was sent, which is no change.
        own = torch.where(counts[:, None] > 0, means, prototypes)
        self.keep("model", trained.parameters)
        self.keep("prototypes", torch.where(known[:, None] > 0, prototypes, own))
        self.keep("known", torch.maximum(known, (counts > 0).float()))
        return Update([own, counts], trained.loss), self.personal_model(received, config)

    def served_model(self, received: list[Tensor], config: Config) -> Predictor:
        """Return the client's own network, with the plain head until there are prototypes."""
        own = self.kept_model(self.initial())
        return self.nearest(own, *received) if bool(received[1].any()) else self.plain(own)

    def personal_model(self, received: list[Tensor], config: Config) -> Predictor | None:
        """Return the network as it was after training, with the prototypes of that time."""
        own, prototypes, known = (self.recall(name) for name in ("model", "prototypes", "known"))
        if own is None or prototypes is None or known is None:
            return None
        return self.nearest(own, prototypes, known)

    def nearest(self, parameters: Tensor, prototypes: Tensor, known: Tensor) -> Predictor:
        """Return a network whose head finds the nearest prototype, by the largest 2 f·c − ||c||²."""
        whole = parameters.clone()
        tensors = self.layout.views(whole)
        tensors["head.weight"].copy_(2 * prototypes)
        tensors["head.bias"].copy_(torch.where(known > 0, -prototypes.square().sum(dim=1), UNKNOWN))
        return self.plain(whole)
