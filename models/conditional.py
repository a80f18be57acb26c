"""FedCP's network: a policy divides the features of each sample between a personal and a global head."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posy.models.chain import ChainModel
from posy.models.layers import FullyConnected
from posy.randomness import seed_of, seeded


class Conditional(nn.Module):
    """Conditional policy on a body, with two heads.

    The policy network sees h ∘ v / ||v||: the features h ``(B, D)`` of a sample, and v ``(D,)``, the sum of the
    personal head's rows, of which it is no function to be differentiated. Of two numbers for each feature the softmax
    tells what share r of it goes to the personal head; 1 − r goes to the global one.
    """

    def __init__(self, model: ChainModel, *, seed: int = 0) -> None:
        super().__init__()
        self.model = model
        with seeded(seed_of(seed, "policy")):  # a stream apart from the network's
            self.policy = FullyConnected(model.embedding_dim, 2 * model.embedding_dim, norm=True)
        self.global_head = copy.deepcopy(model.head)

    def forward(self, x: Tensor, features: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Return the logits ``(B, C)``, on demand after the features ``(B, D)``."""
        seen = self.model.body(x)
        v = F.normalize(self.model.head.weight.detach().sum(dim=0), dim=0)
        personal, shared = torch.softmax(self.policy(seen * v).unflatten(1, (2, -1)), dim=1).unbind(1)
        logits = self.model.head(seen * personal) + self.global_head(seen * shared)
        return (seen, logits) if features else logits
