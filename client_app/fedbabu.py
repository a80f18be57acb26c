"""The FedBABU client trains the body under the common initial head, and fine-tunes the network or only the head."""

from torch import Tensor

from posy.client_app.fedavg_ft import FedAvgFTClient
from posy.client_app.training.work import Train
from posy.strategies.fedbabu import FedBABUSettings


class FedBABUClient(FedAvgFTClient):
    """A FedAvg client with a fixed head, which fine-tunes the whole network or only the head (FedBABU, Algorithm 1)."""

    method: FedBABUSettings

    def work(self, start: Tensor) -> Train:
        """Return the request to train the body."""
        return Train(start, rates={"head": 0.0})

    def fine_tuning(self, start: Tensor) -> Train:
        """Return the request to fine-tune the whole network or only the head."""
        work = super().fine_tuning(start)
        if self.method.tuned == "head":
            work.rates = dict.fromkeys((layer for layer in self.layout.layers if layer != "head"), 0.0)
        return work

    def keep_personal(self, parameters: Tensor) -> None:
        """Store nothing, because all clients share the initial head."""
