"""The FedRep client trains the head with the body fixed, then the body with the head fixed."""

from dataclasses import replace

from posy.client_app.base import PersonalClient
from posy.client_app.hooks import Config, Received, Result, Steps
from posy.client_app.training.work import Train, Trained
from posy.strategies.fedrep import FedRepSettings

HEAD, BODY = 0, 1
"""Values of ``Train.stream``: the two training phases of a round draw their batches independently."""


class FedRepClient(PersonalClient):
    """Train head and body in turn (FedRep, Algorithm 1, client update)."""

    method: FedRepSettings

    def local_round(self, received: Received, config: Config) -> Steps[Result]:
        """Train the head, then the body. Send the body."""
        return self.share((yield from self.alternated(Train(self.assembled(received), stream=BODY))))

    def alternated(self, work: Train) -> Steps[Trained]:
        """Train only the head, starting from ``work.start``, and then run ``work`` on the body only."""
        body = dict.fromkeys((layer for layer in self.layout.layers if layer != "head"), 0.0)
        epochs = None if self.settings.train.local_steps else self.method.head_epochs
        head: Trained = yield Train(work.start, rates=body, epochs=epochs, stream=HEAD)
        trained: Trained = yield replace(work, start=head.parameters, rates={"head": 0.0})
        return trained
