"""FedAvg with fine-tuning: the local model is the served one after some local training."""

from torch import Tensor

from posy.client_app.base import Config, PersonalClient, Predictor, Result, Steps
from posy.client_app.training.work import Train, Trained
from posy.strategies.replies import Update

FINE_TUNING = 1  # its own stream of batches


class FedAvgFTClient(PersonalClient):
    """FedAvg's client; what it predicts with is the fine-tuned model, never sent.

    It is made anew in every evaluation, or, where the last rounds are for it, kept from round to round.
    """

    personal_in_every_evaluation = True

    def local_round(self, received: list[Tensor], config: Config) -> Steps[Result]:
        """Train as FedAvg does, or fine-tune for a round."""
        if self.tuning_rounds and self.method.tunes(self.round, self.settings.run.num_server_rounds):
            own: Trained = yield self.fine_tuning(self.kept_model(self.assembled(received)))
            return Update([], own.loss), self.keep_model(own.parameters)
        update, _ = yield from super().local_round(received, config)
        return update, None

    def personal_model(self, received: list[Tensor], config: Config) -> Steps[Predictor | None]:
        """Fine-tune the served model; where there are rounds for it, return what they have left so far, if anything."""
        if self.tuning_rounds:
            kept = self.recall("model")
            return None if kept is None else self.plain(kept)
        trained: Trained = yield self.fine_tuning(self.assembled(received))
        return self.plain(trained.parameters)

    @property
    def tuning_rounds(self) -> int:
        """Number of the last rounds in which the client fine-tunes."""
        rounds: int = self.method.rounds
        return rounds

    def fine_tuning(self, start: Tensor) -> Train:
        """Return the training that makes the local model, or takes it on by a round."""
        work = Train(start, lr=self.method.lr or None, stream=FINE_TUNING)
        if not self.tuning_rounds:
            work.steps = self.method.steps or None
            work.epochs = None if work.steps else self.method.epochs
        return work
