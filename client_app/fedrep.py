"""FedRep's client: first the head on a fixed body, then the body on a fixed head."""

from torch import Tensor

from posy.client_app.base import Config, Steps, Update
from posy.client_app.fedavg import SharedBodyClient
from posy.client_app.training.work import Train, Trained

HEAD, BODY = 0, 1  # streams of batches


class FedRepClient(SharedBodyClient):
    """Alternate head and body (FedRep, Algorithm 1, lines 6-13)."""

    def local_round(self, received: list[Tensor], config: Config) -> Steps[Update]:
        """Train the head, then the body; send the body."""
        body = [layer for layer in self.layout.layers if layer != "head"]
        start = self.assembled(received[0])
        head: Trained = yield Train(start, rates=dict.fromkeys(body, 0.0), epochs=self.method.head_epochs, stream=HEAD)
        trained: Trained = yield Train(head.parameters, rates={"head": 0.0}, stream=BODY)
        return self.send_shared(trained)
