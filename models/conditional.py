"""FedCP's network: a policy divides the features of each sample between a personal and a global head."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posy.models.chain import ChainModel
from posy.models.layers import FullyConnected
from posy.randomness import seed_of, seeded


class Conditional(nn.Module):
    """A body with a conditional policy and two heads.

    The input of the policy network is h ∘ v / ||v||, where h ``(B, D)`` are the samples' features, and v ``(D,)`` is
    the sum of the personal head's rows, without gradient. For each feature, a softmax over two outputs gives the share
    r of the personal head and the share 1 − r of the global head.
    """

    def __init__(self, model: ChainModel, *, seed: int = 0) -> None:
        super().__init__()
        self.model = model
        with seeded(seed_of(seed, "policy")):  # a different stream from the network's
            self.policy = FullyConnected(model.embedding_dim, 2 * model.embedding_dim, norm=True)
        self.global_head = copy.deepcopy(model.head)

    @property
    def layers(self) -> dict[str, nn.Module]:
        """The policy and the global head, keyed by layer name."""
        return {"policy": self.policy, "global-head": self.global_head}

    def forward(self, x: Tensor, features: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Return the logits ``(B, C)``; with ``features``, the features ``(B, D)`` first."""
        embedded = self.model.body(x)
        v = F.normalize(self.model.head.weight.detach().sum(dim=0), dim=0)
        personal, shared = torch.softmax(self.policy(embedded * v).unflatten(1, (2, -1)), dim=1).unbind(1)
        logits = self.model.head(embedded * personal) + self.global_head(embedded * shared)
        return (embedded, logits) if features else logits
