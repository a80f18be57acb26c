"""FedAvg with fine-tuning: the local model is the served model after some local training."""

from torch import Tensor

from posy.client_app.base import PersonalClient
from posy.client_app.hooks import Config, Received, Result, Steps
from posy.client_app.predictors import Predictor
from posy.client_app.training.work import Train, Trained
from posy.strategies.fedavg_ft import FedAvgFTSettings
from posy.strategies.replies import Update

FINE_TUNING = 1  # value of Train.stream


class FedAvgFTClient(PersonalClient):
    """A FedAvg client that predicts with a fine-tuned model, which it never sends.

    Each evaluation fine-tunes the served model again. If the run's last rounds are reserved for fine-tuning, the client
    instead fine-tunes a model that it stores between these rounds.
    """

    personal_in_every_evaluation = True
    method: FedAvgFTSettings

    def local_round(self, received: Received, config: Config) -> Steps[Result]:
        """Train as FedAvg does or, in one of the last rounds, fine-tune."""
        if self.tuning_rounds and self.method.tunes(self.round, self.settings.run.num_server_rounds):
            tuned: Trained = yield self.fine_tuning(self.kept_model(self.assembled(received)))
            return Update({}, tuned.loss), self.keep_model(tuned.parameters)
        update, _ = yield from super().local_round(received, config)
        return update, None

    def personal_model(self, received: Received, config: Config) -> Steps[Predictor | None]:
        """Return the fine-tuned served model or, with fine-tuning rounds, the stored model, if any."""
        if self.tuning_rounds:
            stored = self.stored.get("model")
            return None if stored is None else self.plain(stored)
        trained: Trained = yield self.fine_tuning(self.assembled(received))
        return self.plain(trained.parameters)

    @property
    def tuning_rounds(self) -> int:
        """Number of fine-tuning rounds at the end of the run."""
        rounds: int = self.method.rounds
        return rounds

    def fine_tuning(self, start: Tensor) -> Train:
        """Return the request to fine-tune a model ``(d,)``, for an evaluation or in one of the last rounds."""
        training = Train(start, lr=self.method.lr or None, stream=FINE_TUNING)
        if not self.tuning_rounds:
            training.steps = self.method.steps or None
            training.epochs = None if training.steps else self.method.epochs
        return training
