"""The FedProto client trains its own network, and pulls the network's features towards all clients' prototypes."""

import torch
from torch import Tensor

from posy.client_app.base import PersonalClient
from posy.client_app.hooks import Config, Received, Result, Steps
from posy.client_app.predictors import Predictor
from posy.client_app.prototypes import class_means, towards_prototypes
from posy.client_app.training.work import Forward, Train, Trained
from posy.strategies.fedproto import FedProtoSettings
from posy.strategies.replies import Update

UNKNOWN = -1e9
"""The output for a class without a prototype."""


class FedProtoClient(PersonalClient):
    """Minimise cross-entropy + λ times the distance from the features to the prototypes (FedProto, Eq. 7)."""

    method: FedProtoSettings

    def local_round(self, received: Received, config: Config) -> Steps[Result]:
        """Train the client's network, and send the prototype and the number of samples of each class."""
        prototypes, defined = received["prototypes"], received["known"]
        strength = torch.tensor(self.method.strength, device=self.device)
        context = {"prototypes": prototypes, "known": defined, "lambda": strength}
        trained: Trained = yield Train(self.kept_model(self.initial()), towards_prototypes, context)
        features, _ = yield Forward(trained.parameters, "train", features=True)
        means, counts = class_means(features, self.data.y_train, self.data.num_classes)
        # For a class without samples, the client returns the served prototype unchanged.
        update = torch.where(counts[:, None] > 0, means, prototypes)
        self.stored["model"] = trained.parameters
        self.stored["prototypes"] = torch.where(defined[:, None] > 0, prototypes, update)
        self.stored["known"] = torch.maximum(defined, (counts > 0).float())
        return Update({"prototypes": update, "counts": counts}, trained.loss), self.personal_model(received, config)

    def served_model(self, received: Received, config: Config) -> Predictor:
        """Return the client's network with the served prototypes as its head.

        Before the server has any prototypes, the network uses its trained head.
        """
        parameters = self.kept_model(self.initial())
        prototypes, defined = received["prototypes"], received["known"]
        return self.nearest(parameters, prototypes, defined) if bool(defined.any()) else self.plain(parameters)

    def personal_model(self, received: Received, config: Config) -> Predictor | None:
        """Return the client's network and prototypes after its last training, or None before its first training."""
        parameters, prototypes, defined = (self.stored.get(name) for name in ("model", "prototypes", "known"))
        if parameters is None or prototypes is None or defined is None:
            return None
        return self.nearest(parameters, prototypes, defined)

    def nearest(self, parameters: Tensor, prototypes: Tensor, defined: Tensor) -> Predictor:
        """Return a network whose head chooses the nearest prototype c, which maximises 2 f·c − ||c||²."""
        parameters = parameters.clone()
        tensors = self.layout.views(parameters)
        tensors["head.weight"].copy_(2 * prototypes)
        tensors["head.bias"].copy_(torch.where(defined > 0, -prototypes.square().sum(dim=1), UNKNOWN))
        return self.plain(parameters)
