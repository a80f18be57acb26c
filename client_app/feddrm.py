"""FedDRM's client: it learns classes with its own classifier, and to tell itself from other clients."""

import torch
from torch import Tensor

from posy.client_app.base import Config, Steps, Update
from posy.client_app.fedavg import SharedBodyClient
from posy.client_app.training.batches import Batch
from posy.client_app.training.work import Context, Net, Train, Trained, cross_entropy
from posy.models.architecture import Architecture
from posy.strategies.feddrm import two_branches


class FedDRMClient(SharedBodyClient):
    """Minimise λ CE(class) + (1 − λ) CE(client = i) (Algorithm 1, lines 6-11)."""

    def network_for(self, plain: Architecture) -> Architecture:
        """Add the client branch."""
        return two_branches(plain, self.settings.data.num_clients, self.method.sharing)

    def local_round(self, received: list[Tensor], config: Config) -> Steps[Update]:
        """Train both branches; keep the class classifier, send all else."""
        context = {
            "client": torch.tensor(self.client, device=self.device),
            "lambda": torch.tensor(self.method.class_weight, device=self.device),
        }
        trained: Trained = yield Train(self.assembled(received[0]), class_and_client, context)
        return self.send_shared(trained)


def class_and_client(net: Net, batch: Batch, context: Context) -> Tensor:
    """Return λ CE(class) + (1 − λ) CE(client = i), the reweighted loss of Section 2.3."""
    classes, clients = net(batch.x)
    own = batch._replace(y=context["client"].expand(len(batch.y)))
    return context["lambda"] * cross_entropy(classes, batch) + (1 - context["lambda"]) * cross_entropy(clients, own)
