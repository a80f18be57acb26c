"""FedSAM with fine-tuning: training uses the gradient at the worst point near the parameters."""

from torch import Tensor

from posy.client_app.fedavg_ft import FedAvgFTClient
from posy.client_app.training.rules import SharpnessAware
from posy.client_app.training.work import Train
from posy.strategies.fedsam_ft import FedSAMFTSettings


class FedSAMFTClient(FedAvgFTClient):
    """Minimise max F_i(w + e) over ||e|| <= rho (FedSAM, Algorithm 1), and fine-tune."""

    method: FedSAMFTSettings

    def work(self, start: Tensor) -> Train:
        """Return the request for local training with SAM."""
        return Train(start, rule=SharpnessAware(self.method.rho) if self.method.rho else None)
