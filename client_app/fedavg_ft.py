"""FedAvg with fine-tuning: the local model is the served one after some local training."""

from torch import Tensor

from posy.client_app.base import Config, PersonalClient, Predictor, Result, Steps
from posy.client_app.training.work import Train, Trained

FINE_TUNING = 1  # its own stream of batches


class FedAvgFTClient(PersonalClient):
    """FedAvg's client; what it predicts with is the fine-tuned model, never sent."""

    personal_in_every_evaluation = True

    def local_round(self, received: list[Tensor], config: Config) -> Steps[Result]:
        """Train as FedAvg does; the local model is made when the round is evaluated."""
        update, _ = yield from super().local_round(received, config)
        return update, None

    def personal_model(self, received: list[Tensor], config: Config) -> Steps[Predictor]:
        """Fine-tune the served model."""
        trained: Trained = yield self.fine_tuning(self.assembled(received))
        return self.plain(trained.parameters)

    def fine_tuning(self, start: Tensor) -> Train:
        """Return the training that makes the local model."""
        steps = self.method.steps or None
        epochs = None if steps else self.method.epochs
        return Train(start, epochs=epochs, steps=steps, lr=self.method.lr or None, stream=FINE_TUNING)
