"""FedRep's client: first the head on a fixed body, then the body on a fixed head."""

from torch import Tensor

from posy.client_app.base import Config, PersonalClient, Result, Steps
from posy.client_app.training.work import Train, Trained

HEAD, BODY = 0, 1  # streams of batches


class FedRepClient(PersonalClient):
    """Alternate head and body (FedRep, Algorithm 1, lines 6-13)."""

    def local_round(self, received: list[Tensor], config: Config) -> Steps[Result]:
        """Train the head, then the body; send the body."""
        body = dict.fromkeys((layer for layer in self.layout.layers if layer != "head"), 0.0)
        start = self.assembled(received)
        head: Trained = yield Train(start, rates=body, epochs=self.method.head_epochs, stream=HEAD)
        trained: Trained = yield Train(head.parameters, rates={"head": 0.0}, stream=BODY)
        return self.share(trained)
