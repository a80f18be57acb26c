"""FedAvg's client: local SGD from the server's model."""

import torch
from torch import Tensor

from posy.client_app.base import Config, PersonalClient, Predictor, Steps, Update, array_of
from posy.client_app.training.work import Train, Trained


class FedAvgClient(PersonalClient):
    """Train what the server sent and send it back."""

    def local_round(self, received: list[Tensor], config: Config) -> Steps[Update]:
        """Run local SGD from the received model (FedAvg, ClientUpdate)."""
        trained: Trained = yield self.work(received[0])
        return Update([array_of(trained.parameters)], float(trained.loss), self.plain(trained.parameters))

    def work(self, start: Tensor) -> Train:
        """Return the local training; the variants of FedAvg change it here."""
        return Train(start)


class SharedBodyClient(FedAvgClient):
    """A client that shares some layers and keeps the others, from the common initialisation on."""

    def personal_layers(self) -> tuple[str, ...]:
        """Return the layers that stay with the client."""
        return ("head",)

    def served_model(self, received: list[Tensor], config: Config) -> Steps[Predictor]:
        """Return the server's layers with the client's own."""
        yield from ()
        return self.plain(self.assembled(received[0]))

    def assembled(self, shared: Tensor) -> Tensor:
        """Return the whole model ``(d,)``: the server's layers with the client's own."""
        kept = self.recall("personal")
        whole = self.initial().clone() if kept is None else torch.empty(self.layout.size, device=self.device)
        if kept is not None:
            self.layout.part(self.personal_layers()).put(whole, kept)
        with torch.no_grad():
            return self.layout.without(self.personal_layers()).put(whole, shared)

    def send_shared(self, trained: Trained) -> Update:
        """Keep the personal layers and send the shared ones."""
        self.keep("personal", self.layout.part(self.personal_layers()).take(trained.parameters).clone())
        shared = self.layout.without(self.personal_layers()).take(trained.parameters)
        return Update([array_of(shared)], float(trained.loss), self.plain(trained.parameters))
