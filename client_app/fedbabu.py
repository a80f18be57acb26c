"""FedBABU's client: it trains the body under the common initial head, and fine-tunes body and head."""

from torch import Tensor

from posy.client_app.fedavg_ft import FedAvgFTClient
from posy.client_app.training.work import Train
from posy.strategies.fedbabu import FedBABUSettings


class FedBABUClient(FedAvgFTClient):
    """FedAvg's client with a fixed head (FedBABU, Algorithm 1), which fine-tunes the whole network or the head."""

    method: FedBABUSettings

    def work(self, start: Tensor) -> Train:
        """Return the request to train the body."""
        return Train(start, rates={"head": 0.0})

    def fine_tuning(self, start: Tensor) -> Train:
        """Return the request to fine-tune the network, or the head alone."""
        work = super().fine_tuning(start)
        if self.method.tuned == "head":
            work.rates = dict.fromkeys((layer for layer in self.layout.layers if layer != "head"), 0.0)
        return work

    def keep_personal(self, parameters: Tensor) -> None:
        """Store nothing, because all clients share the initial head."""
