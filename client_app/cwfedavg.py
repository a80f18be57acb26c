"""The cwFedAvg client: FedAvg with the weight distribution regulariser."""

import torch
from torch import Tensor

from posy.client_app.base import PersonalClient
from posy.client_app.hooks import Config, Received, Result, Steps
from posy.client_app.training.batches import Batch
from posy.client_app.training.work import Context, Net, Train
from posy.strategies.cwfedavg import CwFedAvgSettings

SMALLEST = 1e-12
"""Minimum sum of norms. If the sum is smaller, the distribution is uniform."""


class CwFedAvgClient(PersonalClient):
    """Minimise cross-entropy + λ ||p_i − p̃_i||₂ (Eq. 8)."""

    method: CwFedAvgSettings

    def local_round(self, received: Received, config: Config) -> Steps[Result]:
        """Train as FedAvg does. In the `empirical` ablation, also send the class distribution."""
        update, local = yield from super().local_round(received, config)
        if self.method.distribution == "empirical":
            update.arrays["distribution"] = self.data.class_distribution()
        return update, local

    def assembled(self, received: Received) -> Tensor:
        """Return the whole model ``(d,)``: the averaged layers, and the client's mix of the class-wise layers."""
        return self.method.assembled(self.architecture, received, torch.empty(self.layout.size, device=self.device))

    def work(self, start: Tensor) -> Train:
        """Return the request for local training with the regulariser."""
        if not self.method.wdr or not self.method.wdr_lambda:
            return Train(start)
        strength = torch.tensor(self.method.wdr_lambda, device=self.device)
        return Train(start, regularised, {"distribution": self.data.class_distribution(), "lambda": strength})


def regularised(net: Net, batch: Batch, context: Context) -> Tensor:
    """Return cross-entropy + λ ||p − p̃||₂, where p̃ contains the normalised norms of the head's rows (Eqs. 4, 8)."""
    norms = torch.linalg.vector_norm(net["head.weight"], dim=1)
    total = norms.sum()
    # For a head of zeros, the distribution is uniform, as on the server.
    weights = norms / total.clamp_min(SMALLEST) + (total < SMALLEST) / len(norms)
    distance = torch.linalg.vector_norm(context["distribution"] - weights)
    return net.loss(net(batch.x), batch) + context["lambda"] * distance
