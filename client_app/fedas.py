"""The FedAS client aligns the received body with its latest model's prototypes, then trains the whole network."""

import torch
from torch import Tensor

from posy.client_app.base import PersonalClient
from posy.client_app.hooks import Config, Received, Result, Steps
from posy.client_app.prototypes import class_means
from posy.client_app.training.batches import Batch
from posy.client_app.training.rules import FisherTrace
from posy.client_app.training.work import Context, Forward, Net, Train, Trained
from posy.strategies.fedas import FedASSettings

LOCAL, ALIGNMENT, FISHER = 0, 1, 2  # values of Train.stream


class FedASClient(PersonalClient):
    """Align the body, train the network, and measure the Fisher information (FedAS, Algorithm 1).

    The client stores the prototypes of its latest model instead of the model, which suffices because its samples are
    the same in all rounds. Before the first round of training, the latest model is the initial model.
    """

    method: FedASSettings

    def local_round(self, received: Received, config: Config) -> Steps[Result]:
        """Train, and send the body with the trace of the Fisher information."""
        start = self.assembled(received)
        if self.method.align_epochs:
            start = yield from self.aligned(start)
        trained: Trained = yield Train(start, stream=LOCAL)
        if self.method.align_epochs:
            self.stored["prototypes"] = yield from self.prototypes_of(trained.parameters)
        rule = FisherTrace()
        fisher: Trained = yield Train(trained.parameters, rule=rule, plain=True, measures=True, epochs=1, stream=FISHER)
        update, local = self.share(trained)
        update.arrays["fisher"] = fisher.loss
        return update, local

    def aligned(self, start: Tensor) -> Steps[Tensor]:
        """Return a model ``(d,)`` whose body was trained towards the prototypes of the client's latest model."""
        prototypes = self.stored.get("prototypes")
        if prototypes is None:
            prototypes = yield from self.prototypes_of(self.initial())
        rate, epochs = self.method.align_lr, self.method.align_epochs
        work = Train(start, alignment, {"prototypes": prototypes}, lr=rate, epochs=epochs, stream=ALIGNMENT)
        work.plain, work.rates = True, {"head": 0.0}
        trained: Trained = yield work
        return trained.parameters

    def prototypes_of(self, parameters: Tensor) -> Steps[Tensor]:
        """Return the class means ``(C, D)`` of a model's features over the training samples."""
        features, _ = yield Forward(parameters, "train", features=True)
        return class_means(features, self.data.y_train, self.data.num_classes)[0]


def alignment(net: Net, batch: Batch, context: Context) -> Tensor:
    """Return the mean of (f − p)² over a class's samples and their D features, summed over the classes.

    p is the row of ``context["prototypes"]`` ``(C, D)`` for a sample's class. All samples of a class have the same
    weight.
    """
    prototypes = context["prototypes"]
    features, _ = net.features(batch.x)
    squares = (features - prototypes[batch.y]).square().mean(dim=-1)
    members = (batch.y[:, None] == torch.arange(len(prototypes), device=batch.y.device)).to(squares.dtype)
    if batch.weight is not None:  # padding has weight 0
        members = members * (batch.weight != 0)[:, None]
    return ((squares @ members) / members.sum(dim=0).clamp_min(1)).sum()
