"""The FedAMP client trains its own model, regularised towards the received model u_i."""

import torch
from torch import Tensor

from posy.client_app.base import PersonalClient
from posy.client_app.hooks import Config, Received, Result, Steps
from posy.client_app.training.batches import Batch
from posy.client_app.training.work import Context, Net, Pull, Train, Trained
from posy.strategies.fedamp import FedAMPSettings
from posy.strategies.replies import Update


class FedAMPClient(PersonalClient):
    """Minimise F_i(w) + lambda / (2 alpha) ||w - u_i||^2 (FedAMP, Eq. 4)."""

    method: FedAMPSettings

    def local_round(self, received: Received, config: Config) -> Steps[Result]:
        """Train the client's own model and send it."""
        start, strength = self.kept_model(received["model"]), self.method.strength / self.method.alpha
        if self.method.distance == "squared":
            work = Train(start, pull=Pull(received["model"], strength))
        else:
            message = {
                e.name: received["model"][e.start : e.stop].view(e.shape) for e in self.layout.entries if e.trainable
            }
            work = Train(start, near_message, {**message, STRENGTH: torch.tensor(strength, device=self.device)})
        trained: Trained = yield work
        return Update({"model": trained.parameters}, trained.loss), self.keep_model(trained.parameters)


STRENGTH = "lambda / alpha"
"""Key of the strength in the context, which also contains the tensors of u_i."""


def near_message(net: Net, batch: Batch, context: Context) -> Tensor:
    """Return cross-entropy + lambda / (2 alpha) ||w - u_i||, with the unsquared distance between the parameters."""
    gaps = [(net[name] - tensor).flatten() for name, tensor in context.items() if name != STRENGTH]
    return net.loss(net(batch.x), batch) + context[STRENGTH] / 2 * torch.linalg.vector_norm(torch.cat(gaps))
