"""The FedProx client: FedAvg with a proximal term that keeps the model close to the received model."""

from torch import Tensor

from posy.client_app.base import PersonalClient
from posy.client_app.training.work import Pull, Train
from posy.strategies.fedprox import FedProxSettings


class FedProxClient(PersonalClient):
    """Minimise F_i(w) + mu/2 ||w - w_t||^2 (FedProx, Eq. 2)."""

    method: FedProxSettings

    def work(self, start: Tensor) -> Train:
        """Return the request for local training with the proximal term."""
        return Train(start, pull=Pull(start, self.method.mu))
