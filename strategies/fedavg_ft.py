"""FedAvg with fine-tuning: FedAvg's model, adapted by every client before it is used."""

from typing import Any

from posy.settings import Search, SettingsError, setting
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.method_settings import ALLOWED, MethodSettings
from posy.strategies.replies import Update


class FedAvgFTSettings(MethodSettings, noise=ALLOWED, sums=ALLOWED):
    """Settings of FedAvg with fine-tuning."""

    epochs: int = setting(1, "passes of fine-tuning over the client's training data", minimum=1, search=Search(1, 10))
    steps: int = setting(0, "SGD steps of fine-tuning instead of epochs; 0: use the epochs", minimum=0)
    lr: float = setting(
        0.0, "learning rate of fine-tuning; 0: that of the round", minimum=0, search=Search(0.0005, 0.2, log=True)
    )
    rounds: int = setting(
        0,
        "the last rounds of the run are fine-tuning, in which clients go on with their own models and nothing is "
        "averaged; 0: none, each evaluation fine-tunes the served model",
        minimum=0,
    )

    @property
    def follows_number_of_rounds(self) -> bool:
        """Whether the last rounds differ from the others."""
        return self.rounds > 0

    def tunes(self, server_round: int, num_rounds: int) -> bool:
        """Tell whether a round is one of the last ones, in which clients fine-tune."""
        return server_round > num_rounds - self.rounds


class FedAvgFT(PersonalisedStrategy):
    """Average as FedAvg does; the model stays as it is while the clients fine-tune their own (FedDRM, Section 3.1)."""

    def initialise(self) -> None:
        """Set up the model; raise :class:`SettingsError` for rounds of fine-tuning that cannot be."""
        run, key = self.settings.run, f"{self.settings.run.method}-rounds = {self.method.rounds}"
        if self.method.rounds >= run.num_server_rounds:
            raise SettingsError(f"{key}: it must be less than num-server-rounds = {run.num_server_rounds}")
        if self.method.rounds and run.secure_aggregation:
            raise SettingsError(
                f"{key} does not go with secure-aggregation = true: clients send nothing in these rounds; "
                "set one of them to its default"
            )
        if 0 < self.method.rounds < run.average_rounds:
            raise SettingsError(
                f"average-rounds = {run.average_rounds}: it must be at most {key}, for before these rounds the clients "
                "have no models of their own"
            )
        super().initialise()

    def expected_shapes(self, client: int) -> list[tuple[int, ...]]:
        """Expect a model, and nothing while the clients fine-tune."""
        return [] if self._tuning else super().expected_shapes(client)

    def aggregate(self, server_round: int, updates: list[Update]) -> dict[str, Any]:
        """Average the models, where there are any."""
        return {} if self._tuning else super().aggregate(server_round, updates)

    @property
    def _tuning(self) -> bool:
        tunes: bool = self.method.tunes(self.record.number, self.settings.run.num_server_rounds)
        return tunes
