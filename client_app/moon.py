"""The MOON client pulls its features towards the global features and away from its previous features."""

import torch
import torch.nn.functional as F
from torch import Tensor

from posy.client_app.base import PersonalClient
from posy.client_app.hooks import Config, Received, Result, Steps
from posy.client_app.training.batches import Batch
from posy.client_app.training.work import Context, Forward, Net, Train, Trained, mean_over
from posy.strategies.moon import MOONSettings
from posy.strategies.replies import Update


class MOONClient(PersonalClient):
    """Minimise cross-entropy + μ times the contrastive term (MOON, Algorithm 1).

    The features of the global and the previous model do not change during a round, so they are computed once, in
    evaluation mode and without augmentation.
    """

    method: MOONSettings

    def local_round(self, received: Received, config: Config) -> Steps[Result]:
        """Train from the global model, and store the result for the next round."""
        work = Train(received["model"])
        if self.method.mu:
            both = torch.stack([received["model"], self.kept_model(received["model"])])
            features, _ = yield Forward(both, "train", features=True)
            scales = {"mu": self.method.mu, "temperature": self.method.temperature}
            work.context = {name: torch.tensor(value, device=self.device) for name, value in scales.items()}
            work.objective, work.notes = contrastive, features.transpose(0, 1)
        trained: Trained = yield work
        return Update({"model": trained.parameters}, trained.loss), self.keep_model(trained.parameters)


def contrastive(net: Net, batch: Batch, context: Context) -> Tensor:
    """Return cross-entropy − μ log p, where p is the global model's entry in the softmax of the similarities.

    ``batch.notes`` ``(B, 2, D)`` contains the features of the global and the previous model.
    """
    assert batch.notes is not None
    features, logits = net.features(batch.x)
    similarity = F.cosine_similarity(features.unsqueeze(1), batch.notes, dim=-1) / context["temperature"]
    shares = F.log_softmax(similarity, dim=-1)
    return net.loss(logits, batch) - context["mu"] * mean_over(shares[:, 0], batch)
