"""The Per-FedAvg client minimises the loss after adaptation. The local model is the adapted served model."""

from torch import Tensor

from posy.client_app.fedavg_ft import FINE_TUNING, FedAvgFTClient
from posy.client_app.training.rules import MetaGradient
from posy.client_app.training.work import Train
from posy.strategies.per_fedavg import PerFedAvgSettings


class PerFedAvgClient(FedAvgFTClient):
    """Minimise F_i(w - alpha grad F_i(w)) (Per-FedAvg, Algorithm 1)."""

    tuning_rounds = 0
    method: PerFedAvgSettings  # type: ignore[assignment]  # a separate schedule, without the settings of FedAvgFT

    def work(self, start: Tensor) -> Train:
        """Return the request for local training along the meta-gradient."""
        hessian = self.method.hessian_delta if self.method.hessian == "hf" else 0.0
        return Train(start, rule=MetaGradient(self.method.alpha, hessian))

    def fine_tuning(self, start: Tensor) -> Train:
        """Return the request for the adaptation."""
        return Train(start, steps=self.method.steps, lr=self.method.alpha, plain=True, stream=FINE_TUNING)
