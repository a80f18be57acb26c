"""The FedDRM client learns to predict the class of each sample and the index of the client that holds it."""

import torch
from torch import Tensor

from posy.client_app.base import PersonalClient
from posy.client_app.training.batches import Batch
from posy.client_app.training.work import Context, Net, Train, cross_entropy
from posy.strategies.feddrm import FedDRMSettings


class FedDRMClient(PersonalClient):
    """Minimise λ CE(class) + (1 − λ) CE(client = i) (Algorithm 1, lines 6-11)."""

    method: FedDRMSettings

    def work(self, start: Tensor) -> Train:
        """Return the request to train both branches."""
        context = {
            "client": torch.tensor(self.client, device=self.device),
            "lambda": torch.tensor(self.method.class_weight, device=self.device),
        }
        return Train(start, class_and_client, context)


def class_and_client(net: Net, batch: Batch, context: Context) -> Tensor:
    """Return λ CE(class) + (1 − λ) CE(client = i), the reweighted loss of Section 2.3."""
    classes, clients = net(batch.x)
    of_client = batch._replace(y=context["client"].expand(len(batch.y)))
    return context["lambda"] * net.loss(classes, batch) + (1 - context["lambda"]) * cross_entropy(clients, of_client)
