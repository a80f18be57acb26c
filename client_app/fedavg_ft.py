"""FedAvg with fine-tuning: the local model is the served one after some local training."""

from torch import Tensor

from posy.client_app.base import Config, Predictor, Steps, Update
from posy.client_app.fedavg import FedAvgClient
from posy.client_app.training.work import Train, Trained

FINE_TUNING = 1  # its own stream of batches


class FedAvgFTClient(FedAvgClient):
    """FedAvg's client; what it predicts with is the fine-tuned model, never sent."""

    personal_in_every_evaluation = True

    def local_round(self, received: list[Tensor], config: Config) -> Steps[Update]:
        """Train as FedAvg does; the local model is made when the round is evaluated."""
        update = yield from super().local_round(received, config)
        update.local = None
        return update

    def personal_model(self, received: list[Tensor], config: Config) -> Steps[Predictor | None]:
        """Fine-tune the served model."""
        self.lr = self.method.lr or self.lr
        steps = self.method.steps or None
        trained: Trained = yield Train(
            received[0], epochs=None if steps else self.method.epochs, steps=steps, stream=FINE_TUNING
        )
        return self.plain(trained.parameters)
